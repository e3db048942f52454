"""One call of Megatron's schedule function, planned and executed by this package."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from megatron_epp.corpus.shared_prefixes import PrefixForest, sharing_text
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.ir import Message, Plan, lower_rank
from megatron_epp.mcore.data.row_shard import RowShard, row_block
from megatron_epp.mcore.kinds.registry import require_shared
from megatron_epp.mcore.loops.adapter import forest_of
from megatron_epp.mcore.loops.agreement import exchange
from megatron_epp.mcore.loops.attached import AttachedModel, attached, say
from megatron_epp.mcore.loops.call_arguments import LoopCall, process_groups
from megatron_epp.mcore.loops.microbatch_iterators import MicroBatches
from megatron_epp.mcore.loops.pipelines import ModelPipeline
from megatron_epp.mcore.loops.settings import CallRecord, Settings
from megatron_epp.mcore.loops.slice_stage import SliceStage
from megatron_epp.mcore.model.attention import this_device
from megatron_epp.mcore.model.stage import reserve_exchange
from megatron_epp.planner.calls.call_cost import CallDocuments, features
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

        In training, the method also finalises the gradients.

        Raises:
            ValueError: The call, its micro-batches or the adapter's results are invalid on a rank.
            LoopFailed: Another rank failed; the loop's own errors are raised on the ranks that have
                them.
        """
        call, config = self.call, self.call.config
        replicas = self._read()
        stage = self._run(self._plans(replicas), replicas[self.pipeline.replica])
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

    def _read(self) -> list[list[PrefixForest]]:
        """Set ``groups``; return the documents of every replica's micro-batches.

        Raises:
            ValueError: Ranks of a replica read different micro-batches, no rank has a data
                iterator, or the terms of the call differ.
        """
        call, batches, pipeline, model = self.call, self.batches, self.pipeline, self.model

        def read() -> _Read:
            self.groups = process_groups(call)
            numbers = range(call.num_microbatches if batches.readable else 0)
            forests = [
                forest_of(model.adapter, batches.item(n), n, model.context, model.share_from)
                for n in numbers
            ]
            count, terms = call.num_microbatches, self._terms()
            return _Read(dist.get_rank(), pipeline.replica, count, forests, terms)

        every = exchange(pipeline.programs, "what all ranks of the replica have read", read)
        for one in every:
            for name, value in one.terms.items():
                if value != every[0].terms[name]:
                    raise ValueError(
                        f"{name} differs over the ranks of a call: {every[0].terms[name]} on rank "
                        f"{every[0].rank}, {value} on rank {one.rank}; expected one value"
                    )
        replicas = range(pipeline.lockstep)
        return [_one([one for one in every if one.replica == replica]) for replica in replicas]

    def _terms(self) -> dict[str, Any]:
        """Return what must be equal on all ranks of the call, by name."""
        call, model, adapter = self.call, self.model, type(self.model.adapter)
        functions = (getattr(adapter, name, None) for name in ("lengths", "rows", "loss"))
        codes = (getattr(function, "__code__", None) for function in functions)
        code = b"".join(each.co_code for each in codes if each)
        return {
            "the adapter": f"{adapter.__module__}.{adapter.__qualname__} ({crc32(code):08x})",
            "share_from": model.share_from,
            "slicing": model.slicing,
            "memory_gib": model.memory and model.memory.budget_bytes / GIB,
            "forward_only": bool(call.forward_only),
            "first_val_step": call.first_val_step,
            "calculate_per_token_loss": bool(call.config.calculate_per_token_loss),
        }

    def _plans(self, replicas: Sequence[Sequence[PrefixForest]]) -> tuple[Plan, ...]:
        """Return the plans of the replicas in lockstep, or of this replica alone."""
        call, pipeline, model = self.call, self.pipeline, self.model
        trees = any(forest.shares for forests in replicas for forest in forests)
        if trees:
            require_shared(call.config, "shared prefixes (attach(share_from=))")
            if model.has_front:
                raise ValueError(
                    "shared prefixes: what stands in front of the layers sees documents whole, so "
                    "what they share cannot be computed once; leave attach(share_from=) out"
                )
        calls = tuple(
            CallDocuments(
                tuple(tuple(node.tokens for node in forest.nodes) for forest in forests),
                tuple(tuple(node.parent for node in forest.nodes) for forest in forests if trees),
            )
            for forests in replicas
        )
        make, layers, rates = self.settings.make_plans, pipeline.layers, pipeline.rates_SK3
        tokens = [[sum(of) for of in one.lengths] for one in calls]
        options = pipeline.options(call, tokens)
        options = replace(options, cut=model.slicing, memory=model.memory)
        key = (calls, call.forward_only, options, rates.tobytes())
        return pipeline.planned(key, lambda: make(calls, layers, rates, options, call.forward_only))

    # -------------------------------------------------------------- the ops, and after them

    def _run(self, plans: tuple[Plan, ...], forests: Sequence[PrefixForest]) -> SliceStage:
        """Execute this rank's ops; return its stage. If one rank fails, all ranks raise errors."""
        call, pipeline, config = self.call, self.pipeline, self.call.config
        programs, number, groups = pipeline.programs, pipeline.rank, self.groups
        plan = plans[pipeline.replica]
        programs.current_op.iteration += 1
        splits = groups.tp.size() if config.sequence_parallel else 1
        row_shard = RowShard(groups.cp.size(), groups.cp.rank(), splits, row_block(config))

        def begin() -> None:
            self.meter = self.settings.make_meter(call.one_model)
            where = plans, pipeline.replica, number
            self.stage = SliceStage(
                call, self.batches, *where, groups, self.model, forests, row_shard
            )
            reserve_exchange(self.stage, plans, row_shard)

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
        program = lower_rank(plan, number, plans)
        with stage:
            stores = StageStores([stage.store])
            records, failure = programs.run(program, {number: stage}, stores, links, meter)
        measured = not call.forward_only and programs.groups is not None
        if measured:
            chunks = range(len(plan.chunks))
            tokens = [max(one.chunks[c].tokens for one in plans) for c in chunks]
            # An op takes as long as on the slowest of the replicas that run it together.
            sizes_3C = features(tokens, [max(one.pairs(c) for one in plans) for c in chunks])
            if failure is None and stage.error is None:
                pipeline.seconds.saw(sizes_3C, tuple(records))

        def outcome() -> tuple[int, np.ndarray]:
            if stage.error is not None:
                raise stage.error
            if failure is None:
                return pipeline.rank, pipeline.seconds.rates
            raise failure.error or MemoryError(
                f"{failure.op} of stage {failure.stage} on pipeline rank {failure.rank}: out of "
                f"memory ({failure.reason})"
            )

        every = exchange(programs, "what became of the call on all ranks of the replica", outcome)
        if measured:
            pipeline.rates_SK3 = pipeline.slowest(every, sizes_3C)
        self.batches.finish()
        if least := self.model.share_from:
            shared = sharing_text(forests, "a call", "sample of the micro-batch")
            say(f"megatron_epp: share_from={least}: {shared}")
        if self.settings.observe is not None:
            self.settings.observe(CallRecord(plan, records, meter.peak_bytes))
        return stage


@dataclass(frozen=True, slots=True)
class _Read:
    """What a rank of replica ``replica`` has read: its number of micro-batches, and documents."""

    rank: int
    replica: int
    count: int
    forests: list[PrefixForest]
    terms: dict[str, Any]


def _one(every: Sequence[_Read]) -> list[PrefixForest]:
    """Return the documents of one replica's micro-batches, which all its readers have read.

    Raises:
        ValueError: The ranks have read different micro-batches, or none has read any.
    """
    counts = [one.count for one in every]
    if len(set(counts)) > 1:
        raise ValueError(
            f"num_microbatches differs over the ranks of a pipeline: {counts}; expected one number"
        )
    readers = [one for one in every if one.forests]
    if not readers:
        raise ValueError("no rank of the replica has a data iterator; slices need to read one")
    first = readers[0]
    for reader in readers[1:]:
        for number, (one, other) in enumerate(zip(first.forests, reader.forests, strict=True)):
            if one != other:
                raise ValueError(
                    f"micro-batch {number} differs over ranks: documents of {one} on rank "
                    f"{first.rank}, {other} on rank {reader.rank}; expected the same micro-batches "
                    "on all ranks of a pipeline"
                )
    return first.forests
