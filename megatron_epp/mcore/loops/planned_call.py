"""One call of Megatron's schedule function, planned and executed by this package."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.ir import Message, Plan, lower_rank
from megatron_epp.mcore.data.row_shard import RowShard, row_block
from megatron_epp.mcore.kinds.registry import require_shared
from megatron_epp.mcore.loops.adapter import forest_of
from megatron_epp.mcore.loops.agreement import exchange
from megatron_epp.mcore.loops.attached import AttachedModel, attached
from megatron_epp.mcore.loops.call_arguments import LoopCall, process_groups
from megatron_epp.mcore.loops.microbatch_iterators import MicroBatches
from megatron_epp.mcore.loops.pipelines import ModelPipeline
from megatron_epp.mcore.loops.settings import CallRecord, Settings
from megatron_epp.mcore.loops.slice_stage import SliceStage
from megatron_epp.mcore.model.attention import this_device
from megatron_epp.mcore.model.stage import reserve_exchange
from megatron_epp.planner.calls.call_cost import features
from megatron_epp.runtime.kv_store import StageStores


class PlannedCall:
    """One call of the schedule function by an external training loop, executed by a plan."""

    def __init__(self, settings: Settings, call: LoopCall, pipeline: ModelPipeline):
        self.settings, self.call, self.pipeline = settings, call, pipeline
        self.batches = MicroBatches(call.one_iterator, call.num_microbatches)
        model = attached(call.one_model)
        assert model is not None, "the schedule plans calls of attached models only"
        self.model: AttachedModel = model

    def result(self) -> list[Any]:
        """Run the call and return Megatron's forward_data_store.

        In training, gradients are finalised. Raises LoopRefusal, LoopFailed, or the loop's errors.
        """
        call, config = self.call, self.call.config
        forests = self._read()
        stage = self._run(self._plan(forests), forests)
        if config.finalize_model_grads_func is not None and not call.forward_only:
            total = torch.zeros([], dtype=torch.int, device=this_device())
            config.finalize_model_grads_func(
                [call.one_model],
                stage.tokens + total if config.calculate_per_token_loss else None,
                pg_collection=self.groups,
                force_all_reduce=call.force_all_reduce,
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return stage.in_callers_order()

    # -------------------------------------------------------------- before the ops

    def _read(self) -> list[PrefixForest]:
        """Set ``groups``; return the documents of every micro-batch. Collective.

        Raises:
            ValueError: Ranks read different micro-batches, or no rank has a data iterator.
        """
        call, batches, model = self.call, self.batches, self.model

        def read() -> tuple[int, int, list[PrefixForest]]:
            self.groups = process_groups(call)
            numbers = range(call.num_microbatches if batches.readable else 0)
            forests = [
                forest_of(model.adapter, batches.item(n), n, model.context, model.share_from)
                for n in numbers
            ]
            return dist.get_rank(), call.num_microbatches, forests

        programs = self.pipeline.programs
        every = exchange(programs, "what all ranks of the replica have read", read)
        counts = [count for _, count, _ in every]
        if len(set(counts)) > 1:
            raise ValueError(
                f"num_microbatches differs over the ranks of a pipeline: {counts}; expected one "
                "number"
            )
        readers = [(rank, forests) for rank, _, forests in every if forests]
        if not readers:
            raise ValueError("no rank of the replica has a data iterator; slices need to read one")
        first_rank, first = readers[0]
        for rank, forests in readers[1:]:
            for number, (one, other) in enumerate(zip(first, forests, strict=True)):
                if one != other:
                    raise ValueError(
                        f"micro-batch {number} differs over ranks: documents of {one} on rank "
                        f"{first_rank}, {other} on rank {rank}; expected the same micro-batches "
                        "on all ranks of a pipeline"
                    )
        return first

    def _plan(self, forests: Sequence[PrefixForest]) -> Plan:
        """Return the replica's plan of the call. Collective."""
        call, pipeline, model = self.call, self.pipeline, self.model
        lengths = [tuple(node.tokens for node in forest.nodes) for forest in forests]
        parents = []
        if any(forest.shares for forest in forests):
            require_shared(call.config, "shared prefixes (attach(share_from=))")
            if model.has_front:
                raise ValueError(
                    "shared prefixes: what stands in front of the layers sees documents whole, so "
                    "what they share cannot be computed once; leave attach(share_from=) out"
                )
            parents = [tuple(node.parent for node in forest.nodes) for forest in forests]
        trees = [parents] if parents else []
        make, layers, rates = self.settings.make_plan, pipeline.layers, pipeline.rates_SK3
        options = pipeline.options(call, self.settings.options, [sum(of) for of in lengths])
        options = replace(options, cut=model.slicing, memory=model.memory)
        key = (tuple(lengths), tuple(parents), call.forward_only, options, rates.tobytes())
        return pipeline.plan(
            key, lambda: make(lengths, layers, rates, options, call.forward_only, *trees)
        )

    # -------------------------------------------------------------- the ops, and after them

    def _run(self, plan: Plan, forests: Sequence[PrefixForest]) -> SliceStage:
        """Execute this rank's ops; return its stage. Collective; all ranks raise if one fails."""
        call, pipeline, config = self.call, self.pipeline, self.call.config
        programs, number, groups = pipeline.programs, pipeline.rank, self.groups
        programs.current_op.iteration += 1
        splits = groups.tp.size() if config.sequence_parallel else 1
        row_shard = RowShard(groups.cp.size(), groups.cp.rank(), splits, row_block(config))

        def begin() -> None:
            self.meter = self.settings.make_meter(call.one_model)
            self.stage = SliceStage(
                call, self.batches, plan, number, groups, self.model, forests, row_shard
            )
            reserve_exchange(self.stage, (plan,), row_shard)

        def shape(message: Message) -> tuple[int, ...]:
            rows = row_shard.rows(plan.chunks[message.chunk])
            return row_shard.message(rows), 1, config.hidden_size

        exchange(programs, "the start of all stages of the replica", begin)
        stage, meter = self.stage, self.meter
        dtype = config.pipeline_dtype or getattr(config, "params_dtype", torch.float32)
        links = programs.links(shape, dtype)
        if config.timers is not None:
            timer = config.timers("forward-backward", log_level=1)
            timer.start(barrier=config.barrier_with_L1_time)
        with stage:
            records, failure = programs.run(
                lower_rank(plan, number), {number: stage}, StageStores([stage.store]), links, meter
            )
        if failure is None and not call.forward_only and programs.groups is not None:
            chunks = range(len(plan.chunks))
            sizes_3C = features([c.tokens for c in plan.chunks], [plan.pairs(c) for c in chunks])
            pipeline.seconds.saw(sizes_3C, tuple(records))

        def outcome() -> tuple[int, np.ndarray]:
            if failure is None:
                return pipeline.rank, pipeline.seconds.rates
            raise failure.error or MemoryError(
                f"{failure.op} of stage {failure.stage} on pipeline rank {failure.rank}: out of "
                f"memory ({failure.reason})"
            )

        every = exchange(programs, "what became of the call on all ranks of the replica", outcome)
        # All ranks use the rates of each stage's first rank, so that their rates are equal.
        rates = dict(reversed(every))
        pipeline.rates_SK3 = np.stack([rates[rank] for rank in range(pipeline.stages)])
        self.batches.finish()
        if self.settings.observe is not None:
            self.settings.observe(CallRecord(plan, records, meter.peak_bytes))
        return stage
