"""Chunks of a block (lockstep group of replicas): chunk k of every replica runs at the same time.

    position    0  1  2  3  |  4  5  |  6  |  7
    replica 0   a0 a1 a2 a3 |  d0 d1 |  .  |  .       a, b, c, d: slices of sliced documents
    replica 1   b0 b1 c0 c1 |  .  .  |  .  |  .       .: a pack, or nothing

A position is the index of a chunk. Replicas in lockstep run the same order of ops, so they share
groups (the positions between two bars). A group's forwards run from left to right, its backwards
from right to left. The group has one position per slice of its longest document. Another replica
may run several shorter sliced documents in these positions, one after the other.

A position takes as long as the slowest replica's chunk, so documents are assigned such that the
chunks of a position take about equally long. Each short document, longest first, goes to the
replica and position with the least seconds so far; chunks with slices also get short documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Self

import numpy as np

from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.params import ChunkingParams, forward_turns
from megatron_epp.planner.chunks.slicing import Rates, Spans, cut_each
from megatron_epp.sim.jit import njit


@dataclass(frozen=True, slots=True)
class BlockChunking(Chunking):
    """Chunks of a lockstep group of replicas; ``members`` are the chunkings of its replicas.

    Chunk k of all members runs at the same time. Entry k of ``tokens`` and ``slice_tokens`` is the
    maximum over the members. Entry k of the other arrays of chunks is that of the member whose
    chunk k is the slowest. ``document`` is the index of the chunk's group, or -1 if the group has
    only one chunk. All members have the same groups, and the same order of backwards.
    """

    members: tuple[Chunking, ...]

    @classmethod
    def of(cls, members: Sequence[Chunking], rates: Rates) -> "BlockChunking":
        """Build the chunks from those of the replicas, which have the same groups."""
        taken = np.stack(
            [
                rates.chunk_spans_seconds(each.spans, each.chunk, each.tokens, each.pairs)
                for each in members
            ]
        )
        slowest, starts = taken.argmax(axis=0), members[0].starts
        shown = [slowest[each.chunk] == who for who, each in enumerate(members)]
        sizes = np.diff(starts)
        return cls(
            reduce(add, [each.spans[of] for each, of in zip(members, shown, strict=True)]),
            np.concatenate([each.chunk[of] for each, of in zip(members, shown, strict=True)]),
            starts,
            np.stack([each.tokens for each in members]).max(axis=0),
            np.stack([each.pairs for each in members])[slowest, np.arange(len(slowest))],
            np.where(sizes > 1, np.arange(len(sizes)), -1).repeat(sizes),
            np.stack([each.slice_tokens for each in members]).max(axis=0),
            tuple(members),
        )

    @property
    def last_of_group(self) -> np.ndarray:
        """For every chunk, the last chunk whose forward precedes its backward."""
        return self.members[0].last_of_group

    @property
    def backward(self) -> np.ndarray:
        """Chunks in the order of their backwards."""
        return self.members[0].backward

    @property
    def widths(self) -> np.ndarray:
        """Most chunks of every group that are in flight at a backward of 1F1B."""
        return self.members[0].widths

    @property
    def contents(self) -> tuple[bytes, ...]:
        """Contents of all replicas' chunks as bytes, to compare chunkings."""
        return tuple(part for member in self.members for part in member.contents)

    def arranged(self, order: Sequence[int] | np.ndarray) -> Self:
        """Return the chunking with its groups in ``order``, for all replicas."""
        moved = Chunking.arranged(self, order)
        return replace(
            moved,
            # The document of a block's chunk is the index of the chunk's group.
            document=np.where(moved.document >= 0, moved.group, -1),
            members=tuple(member.arranged(order) for member in self.members),
        )


def folded(chunking: Chunking, width: int, rates: Rates) -> Chunking:
    """Distribute the chunks of a lockstep group over its ``width`` replicas.

    Return the chunking of the group, or ``chunking`` itself if ``width`` is 1.
    """
    if width == 1:
        return chunking
    seconds = rates.chunk_spans_seconds(
        chunking.spans, chunking.chunk, chunking.tokens, chunking.pairs
    )
    sizes, starts = chunking.sizes, chunking.starts
    cut = np.flatnonzero(sizes > 1)
    runs = cut[np.argsort(-sizes[cut], kind="stable")]
    groups, places = _assign_runs(sizes[runs].tolist(), width)
    member = np.zeros(chunking.count, dtype=np.int64)
    position = np.zeros(chunking.count, dtype=np.int64)
    free = np.ones((width, sum(groups)), dtype=bool)
    for run, (who, first) in zip(runs, places, strict=True):
        inside = np.arange(starts[run], starts[run + 1])
        member[inside], position[inside] = who, first + np.arange(len(inside))
        free[who, position[inside]] = False
    packs = starts[:-1][sizes == 1]
    packs = packs[np.argsort(-seconds[packs], kind="stable")]
    more = -(-max(0, len(packs) - int(free.sum())) // width)
    # The longest packs run at the same time, the others next to slices.
    alone = [(who, sum(groups) + place) for place in range(more) for who in range(width)]
    beside = [(int(who), int(place)) for place, who in np.argwhere(free.T)]
    for pack, (who, place) in zip(packs, [*alone, *beside], strict=False):
        member[pack], position[pack] = who, place
    at = chunking.chunk
    ends = np.cumsum([0, *groups, *([1] * more)])
    return block_of(chunking.spans, member[at], position[at], ends, width, rates)


def build_block(
    params: ChunkingParams,
    lengths: np.ndarray,
    rates: Rates,
    most_tokens: int,
    multiple: int,
    width: int,
) -> BlockChunking:
    """Return the chunks of a lockstep group of ``width`` replicas.

    Args:
        params: parameters of the chunks; numbers of chunks and packs are per replica.
        lengths: [documents] lengths of all replicas' documents in tokens, in descending order; at
            least one document per replica.
        rates: seconds per token, query-key pair and chunk.
        most_tokens: maximum number of tokens of a chunk.
        multiple: number of tokens; slice boundaries are multiples of it.
        width: number of replicas.
    """
    total = float(rates.document_seconds(lengths).sum())
    target = total / (width * params.chunks)
    cuts = cut_each(lengths, target * params.cut, rates, most_tokens, multiple)
    inner = np.bincount(cuts.slices.document, minlength=len(cuts.tails))
    groups, places = _assign_runs((inner + 1).tolist(), width)
    cut = cuts.slices + cuts.tails
    cut = cut[np.lexsort((cut.start, cut.document))]
    who, first = np.array(places, dtype=np.int64).reshape(-1, 2).T
    after = np.arange(len(cut)) - (np.cumsum(inner + 1) - inner - 1)[cut.document]
    cut_member, cut_position = who[cut.document], first[cut.document] + after
    missing = params.missing
    beside = sum(groups)
    wanted = round(total / width / target + missing.sum()) + params.extra_bins
    more = max(wanted - beside, 0 if beside else 1)
    short_seconds = rates.span_seconds(cuts.shorts)
    short_tokens = cuts.shorts.tokens.astype(np.float64)
    while True:
        count = beside + more
        seconds, tokens = np.zeros((count, width)), np.zeros((count, width))
        np.add.at(seconds, (cut_position, cut_member), rates.span_seconds(cut))
        np.add.at(tokens, (cut_position, cut_member), cut.tokens)
        small = min(len(missing), more)
        if small:
            seconds[count - small :] += (missing[len(missing) - small :] * target)[:, None]
        # Places without slices first: the long documents of all replicas then share a position.
        rows = np.concatenate((np.arange(beside, count), np.arange(beside)))
        place, fits = _fill(
            seconds[rows].ravel(), tokens[rows].ravel(), short_seconds, short_tokens, most_tokens
        )
        if fits:
            break
        more += max(1, more // 4)
    member, position = place % width, rows[place // width]
    _sort_packs(member, position, short_seconds, beside, count, width)
    ends = np.cumsum([0, *groups, *([1] * more)])
    block = block_of(
        cut + cuts.shorts,
        np.concatenate((cut_member, member)),
        np.concatenate((cut_position, position)),
        ends,
        width,
        rates,
    )
    return block.arranged(forward_turns(params, block.groups, len(groups)))


@njit()
def _fill(seconds, tokens, short_seconds, short_tokens, most_tokens):
    """Return the place (chunk of a replica) of every short document, and whether all fit.

    A document goes to the place with the least seconds, among those with enough tokens left.
    """
    place = np.empty(len(short_seconds), dtype=np.int64)
    for q in range(len(short_seconds)):
        best = -1
        for b in range(len(seconds)):
            if tokens[b] + short_tokens[q] <= most_tokens and (
                best < 0 or seconds[b] < seconds[best]
            ):
                best = b
        if best < 0:
            return place, False
        seconds[best] += short_seconds[q]
        tokens[best] += short_tokens[q]
        place[q] = best
    return place, True


def _sort_packs(
    member: np.ndarray,
    position: np.ndarray,
    seconds: np.ndarray,
    beside: int,
    count: int,
    width: int,
) -> None:
    """Sort every replica's packs by descending time; packs begin at position ``beside``."""
    taken = np.zeros((width, count))
    np.add.at(taken, (member, position), seconds)
    for who in range(width):
        order = beside + np.argsort(-taken[who, beside:], kind="stable")
        new = np.arange(count)
        new[order] = np.arange(beside, count)
        of_member = member == who
        position[of_member] = new[position[of_member]]


def _assign_runs(sizes: Sequence[int], width: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Assign sliced documents to replicas and groups of chunk positions.

    A document goes into the first group in which a replica has enough free positions, to the
    replica with the most free positions. If there is no such group, the document opens a new group
    at the replica with the fewest slices.

    Args:
        sizes: number of slices of each document, in descending order.
        width: number of replicas.

    Returns:
        The number of positions of each group, and (replica, first position) of each document.
    """
    groups: list[int] = []
    starts: list[int] = []
    used: list[list[int]] = []  # positions in use, by group and replica
    slices = [0] * width
    places = []
    for size in sizes:
        for group, taken in enumerate(used):
            if groups[group] - min(taken) >= size:
                who = min(range(width), key=lambda r: (taken[r], slices[r]))
                break
        else:
            group, taken = len(groups), [0] * width
            starts.append(sum(groups))
            groups.append(size)
            used.append(taken)
            who = min(range(width), key=lambda r: slices[r])
        places.append((who, starts[group] + taken[who]))
        taken[who] += size
        slices[who] += size
    return groups, places


def block_of(
    spans: Spans,
    member: np.ndarray,
    position: np.ndarray,
    starts: np.ndarray,
    width: int,
    rates: Rates,
) -> BlockChunking:
    """Return the lockstep group's chunking from spans of all replicas' documents.

    Span s is assigned to chunk ``position[s]`` of replica ``member[s]``, one of ``width`` replicas.
    ``starts`` [groups + 1] contains the first chunk of each group, then the number of chunks. A
    replica without spans gets a document of another replica; there must be at least ``width``
    documents. Chunks that are empty on all replicas are removed.
    """
    member = _none_empty(spans, member, width)
    starts, position = _without_gaps(starts, position)
    is_cut = np.bincount(spans.document)[spans.document] > 1
    members = [
        Chunking.of_spans(spans[of_member], position[of_member], starts, is_cut[of_member])
        for of_member in (member == who for who in range(width))
    ]
    return BlockChunking.of(members, rates)


def _none_empty(spans: Spans, member: np.ndarray, width: int) -> np.ndarray:
    """Return ``member``, the replica of each span, changed so that no replica is empty."""
    member = member.copy()
    for who in range(width):
        if (member == who).any():
            continue
        counts = [len(np.unique(spans.document[member == other])) for other in range(width)]
        donor = int(np.argmax(counts))
        assert counts[donor] > 1, "a block has a document for each of its replicas"
        member[spans.document == spans.document[member == donor].max()] = who
    return member


def _without_gaps(starts: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``starts`` and ``position`` without the positions at which no replica has a document.

    Only positions of packs can be empty.
    """
    there = np.zeros(int(starts[-1]), dtype=bool)
    there[position] = True
    before = np.concatenate(([0], np.cumsum(there)))
    return np.unique(before[starts]), before[position]
