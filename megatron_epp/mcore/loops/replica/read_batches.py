"""Reading of a call's micro-batch sizes, which must be equal on all ranks of a replica."""

from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state as mpu

from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.mcore.loops.adapter import forest_of
from megatron_epp.mcore.loops.attached import AttachedModel
from megatron_epp.mcore.loops.call_arguments import LoopCall
from megatron_epp.mcore.loops.microbatch_iterators import MicroBatches
from megatron_epp.mcore.loops.microbatch_shapes import ShapeFunction, measured
from megatron_epp.mcore.loops.pipelines import ModelPipeline
from megatron_epp.mcore.loops.replica.rank_status import (
    LoopRefusal,
    RankStatus,
    agreed,
    gather_statuses,
    raise_remote_failure,
    refused_by,
)
from megatron_epp.planner.calls.microbatch import MicrobatchShape


def read_shapes(
    call: LoopCall,
    pipeline: ModelPipeline,
    batches: MicroBatches,
    shape: tuple[int, ...] | None,
    by: ShapeFunction | None,
) -> list[MicrobatchShape] | None:
    """Read and compare the shape of every micro-batch. Collective over the replica.

    Args:
        call: The call.
        pipeline: The pipeline of the call's model.
        batches: The micro-batches of this rank.
        shape: Shape of all messages; None if shapes vary.
        by: The loop's function ``lengths``, or a framework's reader.

    Returns:
        The shapes. If ``shape`` is None, the result is None in three cases: a micro-batch's shape
        is unknown, no rank has a data iterator, or ranks have readers of different frameworks.

    Raises:
        RanksDiffer: Ranks read different shapes; raised on every rank.
        LoopRefusal: A rank cannot read its micro-batches, or ranks have different numbers of
            micro-batches; raised on every rank.
    """
    count = call.num_microbatches
    if pipeline.stages == 1:
        return [MicrobatchShape(1)] * count  # one stage needs no shapes for order and messages
    needed = shape is None or by is not None
    shapes = _agreed(
        call,
        pipeline,
        batches,
        (lambda number: measured(batches.item(number), by, number)) if needed else None,
        "it has",
        getattr(by, "framework", ""),
    )
    if shape is not None and (shapes is None or None in shapes):
        config = call.config
        parts = mpu.get_context_parallel_world_size()
        parts *= config.tensor_model_parallel_size if config.sequence_parallel else 1
        return [MicrobatchShape(shape[0] * parts, shape[1])] * count
    return None if shapes is None or None in shapes else shapes


def read_documents(
    call: LoopCall, pipeline: ModelPipeline, batches: MicroBatches, model: AttachedModel
) -> list[PrefixForest]:
    """Read and compare the documents of every micro-batch. Collective over the replica.

    Args:
        call: The call.
        pipeline: The pipeline of the call's model.
        batches: The micro-batches of this rank.
        model: The attached model.

    Returns:
        The documents of each micro-batch with their shared prefixes.

    Raises:
        RanksDiffer: Ranks read different documents; raised on every rank.
        LoopRefusal: As in :func:`read_shapes`.
        ValueError: No rank has a data iterator.
    """
    forests = _agreed(
        call,
        pipeline,
        batches,
        lambda number: forest_of(model.adapter, batches.item(number), number, model.context),
        "documents of",
    )
    if forests is None:
        raise ValueError("no rank of the replica has a data iterator; slices need to read one")
    return forests


def _agreed(
    call: LoopCall,
    pipeline: ModelPipeline,
    batches: MicroBatches,
    read: Callable[[int], Any] | None,
    what: str,
    reader: str = "",
) -> list[Any] | None:
    """Return ``read(number)`` of every micro-batch after checking that all ranks read equal values.

    Ranks without an iterator read nothing. Return None if no rank has an iterator, or if ``reader``
    differs between ranks.
    """
    values, refusal = None, None
    if read is not None and batches.readable:
        try:
            values = [read(number) for number in range(call.num_microbatches)]
        except Exception as error:
            refusal = refused_by(error)
    pipeline.current_op.enter("what all ranks of the replica have read")
    own = RankStatus((call.num_microbatches, values, reader), refusal)
    every = gather_statuses(own, pipeline.control)
    raise_remote_failure(every, pipeline.control)
    counts = [status.value[0] for status in every]
    if len(set(counts)) > 1:
        raise LoopRefusal(
            f"num_microbatches differs over the ranks of a pipeline: {counts}; expected one number"
        )
    if len({status.value[2] for status in every}) > 1:
        return None
    return agreed([status.value[1] for status in every], what, pipeline.control)
