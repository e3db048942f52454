"""Published methods as plans that run, on the stages and ranks that a job has.

    1f1b       whole documents packed to the context, Megatron's warm-up: 1F1B (arXiv 2104.04473),
               interleaved where the stages are
    zb-v       the same packs, backwards split, as many forwards under way as 1F1B holds: ZB-V
               (arXiv 2401.10241), of a V alone
    adaptis    the same packs, backwards split or whole, the best of a few warm-ups: the schedule of
               AdaPtis (arXiv 2509.23722), whose placement and partition are those of the job
    slimpipe   slices of one size, a multiple of the ranks for a document as long as the context,
               backwards whole: SlimPipe (arXiv 2504.14519) without its exchange of contexts

Where strict alternation would stop, because chunks differ, forwards go on. What a method chooses
once for a run is chosen by the job: placement, partition, output layer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.chunks.block import folded
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.fixed_size import fixed_chunks, packed_chunks
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.list_scheduler import Policy
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.planner.virtual.pipeline import (
    Policies,
    Setup,
    interleaved_warm_up,
    warm_up_policy,
    warm_ups,
)

RANK_SLICES = (1, 2, 4)  # times the ranks
MOST_SLICES = 2048
Chunkings = Iterator[tuple[Chunking, str]]


@dataclass(frozen=True, slots=True)
class PublishedMethod:
    """chunkings: that are tried. policies: orders that are tried of each. stands: whether a
    placement, the rank of every stage, is the method's; ``expected``, if not."""

    chunkings: Callable[[SortedBatch, Cost, Options], Chunkings]
    policies: Policies
    stands: Callable[[tuple[int, ...]], bool] = lambda place: True
    expected: str = ""


def packed(batch: SortedBatch, cost: Cost, options: Options) -> Chunkings:
    """Whole documents packed to the context."""
    context = max(options.context, int(batch.lengths[0]))
    rates = rates_of(cost)
    packs = packed_chunks(batch.lengths, context, rates)
    yield folded(packs, options.lockstep, rates), f"packed to {context}"


def _sliced(batch: SortedBatch, cost: Cost, options: Options) -> Chunkings:
    context, rates = max(options.context, int(batch.lengths[0])), rates_of(cost)
    for times in RANK_SLICES:
        each = -(-context // (times * cost.layout.placement.ranks))
        size = -(-each // options.multiple) * options.multiple
        made = fixed_chunks(batch.lengths, size, rates)
        if times > 1 and made.count > MOST_SLICES:
            return
        yield folded(made, options.lockstep, rates), f"slices of {size}"


def _of_interleaved(setup: Setup) -> Iterator[tuple[Policy, str]]:
    ranks, stages = setup.ranks, len(setup.place)
    alone = ranks - 1 - np.arange(ranks)
    warm = (alone if stages == ranks else interleaved_warm_up(ranks, stages)) + 1
    yield from _held(setup, warm, split=False)


def _of_v(setup: Setup) -> Iterator[tuple[Policy, str]]:
    yield from _held(setup, np.full(setup.ranks, 2 * setup.ranks), split=True)


def _held(setup: Setup, warm: np.ndarray, split: bool) -> Iterator[tuple[Policy, str]]:
    for strict, how in ((True, ""), (False, ", forwards where nothing else can run")):
        flags = {"split": split, "deep": True, "strict": strict}
        said = f"{'split' if split else 'whole'} backwards, {warm[0]} forwards first{how}"
        yield warm_up_policy(setup.place, setup.loads.chunks, warm, **flags), said


def _is_interleaved(place: tuple[int, ...]) -> bool:
    ranks = max(place) + 1
    return place == tuple(range(ranks)) * (len(place) // ranks)


def _is_v(place: tuple[int, ...]) -> bool:
    half = len(place) // 2
    return half > 0 and sorted(place[:half]) == list(range(half)) and place == place[::-1]


METHODS: Mapping[str, PublishedMethod] = {
    "1f1b": PublishedMethod(
        packed, _of_interleaved, _is_interleaved, "one stage a rank, or interleaved N"
    ),
    "zb-v": PublishedMethod(packed, _of_v, _is_v, "v"),
    "adaptis": PublishedMethod(packed, warm_ups((True, False))),
    "slimpipe": PublishedMethod(_sliced, warm_ups((False,))),
}
