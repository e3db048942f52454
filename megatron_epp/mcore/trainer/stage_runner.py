"""Runner of a rank's part of a step, which combines plan, data, K/V stores and stage modules."""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_epp.control.accept import AcceptedStep
from megatron_epp.ir import Plan, Timed, lower_rank, slices_of
from megatron_epp.layers.chunk_state import store_for
from megatron_epp.mcore.data.chunk_batches import ChunkBatchBuilder
from megatron_epp.mcore.data.global_batches import Batch, TokenSource
from megatron_epp.mcore.data.mtp_targets import Predictions
from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.mcore.lm_head.head import head_for
from megatron_epp.mcore.lm_head.messages import MessageShapes
from megatron_epp.mcore.model.quantisation import forget_quantised_weights
from megatron_epp.mcore.model.stage import (
    ForwardStep,
    ModelStage,
    reduce_in_turn,
    reserve_exchange,
    sum_reports,
)
from megatron_epp.runtime.executor import Failure
from megatron_epp.runtime.host_store import HostMemory, HostStore
from megatron_epp.runtime.kv_store import StageStores
from megatron_epp.runtime.memory_meter import Meter
from megatron_epp.runtime.program_runner import ProgramRunner

_PART_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func")


@dataclass(frozen=True, slots=True)
class StageRun:
    """Results of a rank for its part of a step.

    Attributes:
        plan: Plan of this replica.
        records: Start and stop (seconds) and peak bytes of each of this rank's ops.
        reports: A list with one report of the loss, summed over this replica's chunks; empty on
            ranks without the last stage.
        tokens: Number of tokens with a loss; 0 on ranks without the last stage.
        failure: The op that ran out of memory, which makes the other results invalid; or None.
        host_peak_bytes: Peak bytes of host memory for offloaded layers.
    """

    plan: Plan
    records: tuple[Timed, ...]
    reports: list[dict[str, Tensor]]
    tokens: Tensor | int
    failure: Failure | None
    host_peak_bytes: int


@dataclass(frozen=True, slots=True)
class StageRunner:
    """Runner of a rank's part of steps.

    Attributes:
        programs: Runner of the rank's programs.
        stages: Stages of the rank, first to last.
        replica: Index of this rank's replica.
        row_shard: This rank's shard of a chunk's rows.
        meter: Meter of the bytes that the rank holds.
        fused_head: Whether the last stage's F also runs the backward of the LM head.
        stores_last_slice: Whether K/V of a document's last slice are also stored.
        make_stage: Function that creates the runner of a stage's ops (model/stage.py).
        host_bytes: Limit of the host memory for offloaded layers, in bytes.
    """

    programs: ProgramRunner
    stages: tuple[int, ...]
    replica: int
    row_shard: RowShard
    meter: Meter
    fused_head: bool
    stores_last_slice: bool
    make_stage: Callable[..., ModelStage] = ModelStage
    host_bytes: float = math.inf

    def run(
        self,
        step: AcceptedStep,
        batch: Batch,
        documents: TokenSource,
        models: Sequence[Any],
        config: Any,
        forward_step: ForwardStep,
    ) -> StageRun:
        """Run this replica's plan on its documents of ``batch``, accumulating gradients.

        Args:
            step: The accepted step, which contains the plans of all replicas.
            batch: The global batch.
            documents: Source of the documents' tokens.
            models: Stage modules of :attr:`stages`, in the same order.
            config: Megatron's configuration of the models.
            forward_step: Megatron's forward step function.

        Returns:
            Records, summed losses and number of tokens. If an op runs out of memory,
            :attr:`StageRun.failure` names the op, and no exception is raised.

        Raises:
            PlanError: Only one of plan and model has vocabulary parallelism.
        """
        # Step 1: select this replica's plan and its samples of the global batch.
        replica, device = self.replica, self.programs.device
        plan, block = step.plan_of(replica), step.plans
        held = step.part.samples_of(replica)
        samples = [[batch.sample(document) for document in holders] for holders in held]
        # Step 2: clear fp8 weights cached in the last iteration.
        for model in models:
            forget_quantised_weights(model)
        # Step 3: lower this rank's ops to a program with sends and receives.
        slices = slices_of(plan)
        rank = plan.rank_of[self.stages[0]]
        program = lower_rank(plan, rank, block)
        # Step 4: determine the shapes of the messages between stages.
        predictions = Predictions.of(config, not plan.forward_only)
        dtype = config.pipeline_dtype or config.params_dtype
        shapes = MessageShapes(
            plan,
            lambda chunk: self.row_shard.message(self.row_shard.rows(plan.chunks[chunk])),
            config.hidden_size,
            dtype,
            predictions.each,
        )
        # Step 5: create the runner of every stage of this rank, with its tokens, K/V store, host
        # store and LM head.
        computes: dict[int, ModelStage] = {}
        memory = HostMemory(self.host_bytes)
        with ExitStack() as stack:
            for number, (stage, model) in enumerate(zip(self.stages, models, strict=True)):
                builder = ChunkBatchBuilder(
                    plan,
                    slices,
                    samples,
                    step.part.ends_of(replica),
                    documents,
                    stage,
                    self.row_shard,
                    device,
                    predictions,
                    block,
                )
                stage_object = self.make_stage(
                    model,
                    _config_of_part(config, number),
                    forward_step,
                    builder,
                    plan,
                    store_for(plan, slices, self.stores_last_slice),
                    self.fused_head,
                    HostStore(device, self.meter, model.parameters(), memory),
                    head_for(model, plan, stage, shapes, self.meter),
                )
                reserve_exchange(stage_object, block, self.row_shard)
                computes[stage] = stack.enter_context(stage_object)
            # Step 6: let all replicas start the stages' gradient reductions in the same order.
            reduce_in_turn(computes, plan.rank_orders[rank])
            # Step 7: connect the stages and run the program.
            store = StageStores([compute.store for compute in computes.values()])
            links = self.programs.links(shapes, dtype)
            records, failure = self.programs.run(program, computes, store, links, self.meter)
        # Step 8: sum the tokens and reports of the stages.
        tokens = sum((compute.tokens for compute in computes.values()), 0)
        reports = [one for compute in computes.values() for one in sum_reports(compute.reports)]
        return StageRun(plan, records, reports, tokens, failure, memory.peak_bytes)

    def flop_boundaries(self, plan: Plan) -> Tensor:
        """Return cumulative lengths with the tokens and attention pairs of ``plan``: [lengths + 1].

        Without shared prefixes, the lengths are those of the documents. With shared prefixes, each
        document of L tokens after a prefix of P tokens has two lengths, whose sum is L, and whose
        squares sum to (P + L)^2 - P^2. For a plan without documents, the result is that of an empty
        document, because all ranks must take part in Megatron's sum of FLOPs.
        """
        lengths: list[float] = []
        for document, tokens in enumerate(plan.documents or (0,)):
            root = math.sqrt(tokens**2 + 4 * tokens * plan.offset(document))
            lengths += [(tokens + root) / 2, (tokens - root) / 2]
        boundaries = numpy.concatenate(
            ([0], numpy.cumsum(lengths if plan.prefixes else lengths[::2]))
        )
        return torch.from_numpy(boundaries).to(self.programs.device)


def _config_of_part(config: Any, number: int) -> Any:
    """Return ``config`` with the DDP functions of the rank's stage module ``number``.

    If a rank has several stage modules, ``config`` contains lists with a function of each module.
    """
    if not isinstance(config.no_sync_func, list):
        return config
    own = copy.copy(config)
    for name in _PART_FUNCTIONS:
        if isinstance(functions := getattr(config, name), list):
            setattr(own, name, functions[number])
    return own
