"""Chunks with short documents that one context-parallel rank computes without all-to-all.

    rank 0   tail of a document     | e e e g g   |      a a a a a . |      the tail: on all ranks;
    rank 1   tail of a document     | f f f h h h |      b b c c d d |      a to h: on one rank

If one rank can compute a document within about a chunk's time, it does so alone. Each of these
documents, longest first, goes to the chunk and rank with the least seconds so far. Longer documents
are sharded over all ranks, and may be sliced. All ranks of a chunk are padded (.) to the tokens of
the fullest rank, and the chunk takes as long as its slowest rank. A pack without sharded documents
consists of one set of documents per rank. These sets are therefore sorted by tokens, so that the
sets of a pack have similar numbers of tokens.
"""

import dataclasses
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from megatron_epp.ir import ALL_RANKS
from megatron_epp.planner.chunks.bin_packing import longest_first
from megatron_epp.planner.chunks.chunking import Chunking, assemble
from megatron_epp.planner.chunks.slicing import Cuts, Cutter, Rates, Spans, cut_each
from megatron_epp.sim.jit import njit


def rank_seconds(lengths: np.ndarray, rates: Rates, ranks: int) -> np.ndarray:
    """Return the seconds of unsliced documents if one of ``ranks`` ranks computes each alone."""
    return ranks * (rates.document_seconds(lengths) - rates.exchange_seconds * lengths)


def first_local(
    lengths: np.ndarray,
    chunks: float,
    fraction: float,
    rates: Rates,
    most_tokens: float,
    ranks: int,
) -> tuple[int, float]:
    """Return the index of the longest single-rank document, and the seconds of a chunk.

    A single-rank document is one that a context-parallel rank computes alone. If there is none, the
    index is the number of documents.

    Args:
        lengths: [documents] document lengths in tokens, in descending order.
        chunks: number of chunks.
        fraction: maximum time of a single-rank document, as a fraction of a chunk's time.
        rates: seconds per token, query-key pair and chunk.
        most_tokens: maximum number of tokens of a chunk.
        ranks: number of context-parallel ranks.
    """
    sharded, alone = rates.document_seconds(lengths), rank_seconds(lengths, rates, ranks)
    target = float(sharded.sum()) / chunks
    first = int(np.searchsorted(-alone, -fraction * target))
    first = max(first, int(np.searchsorted(-lengths, -most_tokens / ranks)))
    target = float(sharded[:first].sum() + alone[first:].sum() / ranks) / chunks
    return first, target


def local_chunks(
    lengths: np.ndarray,
    first: int,
    target_seconds: float,
    cut: float,
    missing: np.ndarray,
    extra_bins: int,
    rates: Rates,
    most_tokens: int,
    multiple: int,
    ranks: int,
    cutter: Cutter = cut_each,
) -> tuple[Chunking, int]:
    """Return chunks of about ``target_seconds``, and the number of sliced documents.

    The documents from index ``first`` on are single-rank documents.

    Args:
        lengths: [documents] document lengths in tokens, in descending order.
        first: index of the first single-rank document.
        target_seconds: seconds of a chunk.
        cut: time of a slice as a fraction of a chunk's time.
        missing: [last packs] fraction of a chunk's time by which each of the last packs is shorter.
        extra_bins: number of packs in addition to those that are required if packs are filled
            evenly; may be negative.
        rates: seconds per token, query-key pair and chunk.
        most_tokens: maximum number of tokens of a chunk.
        multiple: number of tokens; slice boundaries are multiples of it.
        ranks: number of context-parallel ranks.
        cutter: :func:`cut_each`, or a caching version.
    """
    cuts = cutter(lengths[:first], target_seconds * cut, rates, most_tokens, multiple)
    tails, shorts = len(cuts.tails), len(cuts.shorts)
    sharded = np.concatenate((rates.span_seconds(cuts.tails), rates.span_seconds(cuts.shorts)))
    alone = rank_seconds(lengths[first:], rates, ranks)
    loose = float(sharded.sum() + alone.sum() / ranks)
    bins = max(1, tails, round(loose / target_seconds + missing.sum()) + extra_bins)
    level = loose / max(0.5, bins - missing.sum())
    # Sharded documents fill as few packs as possible: the other packs exchange nothing.
    wanted = max(tails, -(-float(sharded.sum()) // level)) if len(sharded) else 0
    if wanted:
        bucket, used = longest_first(cuts, rates, int(wanted), most_tokens)
    else:
        bucket, used = np.zeros(0, dtype=np.int64), 0
    bins = max(bins, used)
    seconds, rows = np.zeros(bins), np.zeros(bins)
    np.add.at(seconds, bucket, sharded)
    np.add.at(rows, bucket, np.concatenate((cuts.tails.tokens, cuts.shorts.tokens)) / ranks)
    small = min(len(missing), bins - used)
    if small:
        seconds[bins - small :] += missing[len(missing) - small :] * level
    place, bins = _assign(
        np.repeat(seconds, ranks),
        np.repeat(rows, ranks),
        alone,
        lengths[first:].astype(np.float64),
        most_tokens / ranks,
        ranks,
    )
    own = np.zeros(bins * ranks)
    np.add.at(own, place, lengths[first:])
    # Ranks of full-size packs without sharded documents may be permuted.
    free = np.arange(used * ranks, (len(seconds) - small) * ranks)
    new = np.arange(bins * ranks)
    new[free[np.argsort(-own[free], kind="stable")]] = free
    place = new[place]
    bucket = np.concatenate((bucket, place // ranks))
    number = np.cumsum(np.bincount(bucket, minlength=bins) > 0) - 1  # without empty packs
    local = np.arange(first, len(lengths))
    all_short = cuts.shorts + Spans(local, np.zeros_like(local), lengths[first:])
    short_cuts = Cuts(cuts.slices, cuts.tails, all_short)
    chunking = assemble(short_cuts, number[bucket], int(number[-1]) + 1, rates)
    everywhere = np.full(len(cuts.slices) + tails + shorts, ALL_RANKS)
    rank = np.concatenate((everywhere, place % ranks))
    return dataclasses.replace(chunking, rank=rank, ranks=ranks), tails


@njit()
def _assign(seconds, rows, document_seconds, tokens, most_rows, ranks):
    """Return the place of every document (c * ranks + r: rank r of chunk c), and the chunk count.

    Documents go, longest first, to the place with the least seconds so far. If all places are full,
    a chunk is added.
    """
    count = len(seconds)
    taken = np.zeros(count + ranks * (len(tokens) + 1))
    taken[:count] = rows
    heap = [(seconds[place], place) for place in range(count)]
    heapify(heap)
    places = np.empty(len(tokens), dtype=np.int64)
    for document in range(len(tokens)):
        while len(heap) and taken[heap[0][1]] + tokens[document] > most_rows:
            heappop(heap)  # full, or nearly
        if not len(heap):
            for place in range(count, count + ranks):
                heappush(heap, (0.0, place))
            count += ranks
        done, place = heap[0]
        heapreplace(heap, (done + document_seconds[document], place))
        taken[place] += tokens[document]
        places[document] = place
    return places, count // ranks
