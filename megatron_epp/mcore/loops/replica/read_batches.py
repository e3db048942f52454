"""Reading of a call's micro-batch sizes, which must be equal on all ranks of a replica."""

from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.mcore.loops.adapter import forest_of
from megatron_epp.mcore.loops.attached import AttachedModel
from megatron_epp.mcore.loops.call_arguments import LoopCall
from megatron_epp.mcore.loops.microbatch_iterators import MicroBatches
from megatron_epp.mcore.loops.pipelines import ModelPipeline
from megatron_epp.mcore.loops.replica.rank_status import (
    LoopRefusal,
    RankStatus,
    agreed,
    gather_statuses,
    raise_remote_failure,
    refused_by,
)


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
        LoopRefusal: A rank cannot read its micro-batches, or ranks have different numbers of
            micro-batches; raised on every rank.
        ValueError: No rank has a data iterator.
    """
    values, refusal = None, None
    if batches.readable:
        try:
            values = [
                forest_of(model.adapter, batches.item(number), number, model.context)
                for number in range(call.num_microbatches)
            ]
        except Exception as error:
            refusal = refused_by(error)
    pipeline.current_op.enter("what all ranks of the replica have read")
    status = RankStatus((call.num_microbatches, values), refusal)
    every = gather_statuses(status, pipeline.control)
    raise_remote_failure(every, pipeline.control)
    counts = [status.value[0] for status in every]
    if len(set(counts)) > 1:
        raise LoopRefusal(
            f"num_microbatches differs over the ranks of a pipeline: {counts}; expected one number"
        )
    forests = agreed([status.value[1] for status in every], "documents of", pipeline.control)
    if forests is None:
        raise ValueError("no rank of the replica has a data iterator; slices need to read one")
    return forests
