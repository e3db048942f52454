"""Parameters by which a search varies the chunks of a batch."""

from dataclasses import dataclass

import numpy as np

from megatron_epp.planner.chunks.bin_packing import longest_first
from megatron_epp.planner.chunks.chunking import Chunking, assemble
from megatron_epp.planner.chunks.local import first_local, local_chunks
from megatron_epp.planner.chunks.slicing import Cutter, Rates, cut_each

# Sizes of the packs at an end of the iteration, as fractions of the other packs' size. Small packs
# fill the pipeline sooner at the start and drain it sooner at the end.
TAPERS: tuple[tuple[float, ...], ...] = (
    (),
    (0.5,),
    (0.25,),
    (0.25, 0.5),
    (0.2, 0.4, 0.6, 0.8),
    (0.1, 0.2, 0.3, 0.45, 0.6, 0.8),
)

RAMP_FROM = 0.05  # size of a ramp's first pack, as a fraction of a full pack; chosen by hand

UNCUT = 1e6  # with this ``cut``, only documents that no stage can hold are sliced


@dataclass(frozen=True, slots=True)
class ChunkingParams:
    """Parameters of the chunks of a batch.

    Attributes:
        chunks: approximate number of chunks.
        cut: time of a slice as a fraction of a chunk's time; UNCUT: a document is sliced only if it
            is too long for one chunk.
        extra_bins: number of packs in addition to those that are required if packs are filled
            evenly; may be negative.
        front: index into TAPERS, which contains the sizes of the small packs at the start. If
            documents share prefixes, it is an index into trees.ENDS instead.
        back: the same for the small packs at the end.
        reverse: whether chunks of short documents run first.
        bare: whether to recompute only as much as is required if one document at a time is in
            flight. Forwards of further documents then wait for memory.
        local: maximum time of a document that one context-parallel rank computes alone, as a
            fraction of a chunk's time (:mod:`.local`); 0: all documents are sharded.
        ramp: number of packs at the start whose sizes grow by a constant factor, in place of those
            of ``front``; 0: ``front`` applies.
    """

    chunks: float
    cut: float = 1.0
    extra_bins: int = 0
    front: int = 0
    back: int = 0
    reverse: bool = False
    bare: bool = False
    local: float = 0.0
    ramp: int = 0

    @property
    def ramp_fractions(self) -> tuple[float, ...]:
        """Sizes of the small first packs, in order, as fractions of the other packs' size."""
        if not self.ramp:
            return TAPERS[self.front]
        return tuple(RAMP_FROM ** (1 - pack / self.ramp) for pack in range(self.ramp))

    @property
    def missing(self) -> np.ndarray:
        """[small packs]: fraction of a full pack that each lacks, first packs, then last packs."""
        return np.array([1 - fraction for fraction in self.ramp_fractions + TAPERS[self.back]])

    def __str__(self) -> str:
        parts = [f"chunks of about 1/{self.chunks:.3g} of the work"]
        if self.cut >= UNCUT:
            parts.append("documents left whole")
        elif self.cut != 1.0:
            parts.append(f"slices of {self.cut:.0%} of a chunk")
        if self.extra_bins:
            extra = abs(self.extra_bins)
            more = "more" if self.extra_bins > 0 else "fewer"
            parts.append(f"{extra} pack{'s' * (extra > 1)} {more} than even filling needs")
        first = self.front and not self.ramp
        ends = [end for end, small in (("first", first), ("last", self.back)) if small]
        if self.ramp:
            parts.append(f"{self.ramp} packs first that grow")
        if ends:
            parts.append(f"small packs {' and '.join(ends)}")
        if self.reverse:
            parts.append("short documents first")
        if self.bare:
            parts.append("recompute for one document at a time")
        if self.local:
            parts.append(f"documents local that a rank does in {self.local:.0%} of a chunk")
        return ", ".join(parts)


def build_chunks(
    params: ChunkingParams,
    lengths: np.ndarray,
    rates: Rates,
    most_tokens: int,
    multiple: int = 1,
    ranks: int = 1,
    cutter: Cutter = cut_each,
) -> Chunking:
    """Build chunks: slice long documents individually, and pack the rest, longest first.

    Args:
        params: parameters of the chunks.
        lengths: [documents] document lengths in tokens, in descending order.
        rates: seconds per token, query-key pair and chunk.
        most_tokens: maximum number of tokens of a chunk.
        multiple: number of tokens; slice boundaries are multiples of it.
        ranks: number of context-parallel ranks of a stage.
        cutter: :func:`cut_each`, or a caching version.
    """
    if params.local:
        wanted = params.chunks, params.local
        first, target = first_local(lengths, *wanted, rates, most_tokens, ranks)
        packs = params.cut, params.missing, params.extra_bins
        limits = most_tokens, multiple, ranks
        chunking, tails = local_chunks(lengths, first, target, *packs, rates, *limits, cutter)
        return chunking.arranged(forward_turns(params, chunking.groups, tails))
    total = float(rates.document_seconds(lengths).sum())
    target = total / params.chunks
    cuts = cutter(lengths, target * params.cut, rates, most_tokens, multiple)
    loose = float(rates.span_seconds(cuts.tails).sum() + rates.span_seconds(cuts.shorts).sum())
    missing = params.missing
    bins = max(1, round(loose / target + missing.sum()) + params.extra_bins)
    level = loose / max(0.5, bins - missing.sum())
    bucket, count = longest_first(cuts, rates, bins, most_tokens, missing * level)
    chunking = assemble(cuts, bucket, count, rates)
    return chunking.arranged(forward_turns(params, chunking.groups, len(cuts.tails)))


def forward_turns(params: ChunkingParams, groups: int, tails: int) -> np.ndarray:
    """Return the groups in forward order; the first ``tails`` groups are sliced documents."""
    small_ones, order = len(params.ramp_fractions), np.arange(groups)
    if params.reverse:
        order = order[::-1]
    # Packs are in descending order, so the small packs are last: move them to the front.
    small = np.arange(groups - 1, groups - 1 - min(small_ones, groups - tails), -1)
    return np.concatenate((small, order[~np.isin(order, small)]))
