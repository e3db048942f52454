"""Packing of tails and short documents into chunks: Alg. 1, longest first, or first fit.

Alg. 1 is that of the InfiniPipe paper. A tail is the last slice of a sliced document. Every chunk
(called bin or bucket here) holds at most one tail.
"""

import numpy as np

from megatron_epp.planner.chunks.slicing import Cuts, Rates
from megatron_epp.sim.jit import njit


def alg1(
    cuts: Cuts, rates: Rates, target_seconds: float, most_tokens: float
) -> tuple[np.ndarray, int]:
    """Return the bucket of every tail, then of every short document, and the number of buckets.

    Source: InfiniPipe's Alg. 1, lines 3 to 13, in its section on the sequence processor. Tail t
    opens bucket t. Then each short document, longest first, goes to the bucket with the smallest
    time per token among those that stay within both limits. If the document would exceed the token
    limit of every bucket, it opens a new one. If only the time limit excludes all buckets, the time
    limit is raised.

    Args:
        cuts: tails (last slices of sliced documents) and short documents.
        rates: seconds per token, query-key pair and chunk.
        target_seconds: time limit T_t of a bucket, in seconds.
        most_tokens: token limit T_m of a bucket.
    """
    tail_seconds = rates.span_seconds(cuts.tails)
    short_seconds = rates.span_seconds(cuts.shorts)
    return _alg1(
        tail_seconds,
        cuts.tails.tokens.astype(np.float64),
        short_seconds,
        cuts.shorts.tokens.astype(np.float64),
        float(target_seconds),
        float(most_tokens),
    )


@njit()
def _alg1(tail_seconds, tail_tokens, short_seconds, short_tokens, target, most_tokens):
    tails, shorts = len(tail_seconds), len(short_seconds)
    seconds = np.empty(tails + shorts)
    tokens = np.empty(tails + shorts)
    bucket = np.empty(tails + shorts, dtype=np.int64)
    count = tails
    for t in range(tails):
        seconds[t], tokens[t], bucket[t] = tail_seconds[t], tail_tokens[t], t
    for q in range(shorts):
        chosen, fits = -1, False
        best = np.inf
        least = np.inf  # least time of a bucket with enough token capacity
        for b in range(count):
            if tokens[b] + short_tokens[q] <= most_tokens:
                fits = True
                least = min(least, seconds[b])
        if not fits:
            chosen = count
            seconds[count], tokens[count] = 0.0, 0.0
            count += 1
        else:
            # Line 13, in one step: raise the target until the least loaded bucket has time left.
            target = max(target, least + short_seconds[q])
            for b in range(count):
                if (
                    tokens[b] + short_tokens[q] <= most_tokens
                    and seconds[b] + short_seconds[q] <= target
                    and seconds[b] < best * tokens[b]
                ):
                    best, chosen = seconds[b] / tokens[b], b
        seconds[chosen] += short_seconds[q]
        tokens[chosen] += short_tokens[q]
        bucket[tails + q] = chosen
    return bucket, count


def longest_first(
    cuts: Cuts,
    rates: Rates,
    bins: int,
    most_tokens: float,
    loaded_seconds: np.ndarray | None = None,
) -> tuple[np.ndarray, int]:
    """Return the bin of every tail, then of every short document, and the number of bins.

    Tail t opens bin t. Then each short document, longest first, goes to the bin with the least
    seconds so far, among those that stay within ``most_tokens``.

    Args:
        cuts: tails (last slices of sliced documents) and short documents.
        rates: seconds per token, query-key pair and chunk.
        bins: wanted number of bins, at least one per tail. If a document fits in no bin, a bin is
            added. Bins that stay empty are removed.
        most_tokens: maximum number of tokens of a bin.
        loaded_seconds: [n] initial seconds of the last n bins, so that these get fewer documents;
            None: all bins begin with 0 seconds.
    """
    start = np.zeros(max(bins, len(cuts.tails)))
    if loaded_seconds is not None and len(loaded_seconds):
        free = min(len(loaded_seconds), len(start) - len(cuts.tails))
        if free:
            start[len(start) - free :] = loaded_seconds[len(loaded_seconds) - free :]
    return _longest_first(
        rates.span_seconds(cuts.tails),
        cuts.tails.tokens.astype(np.float64),
        rates.span_seconds(cuts.shorts),
        cuts.shorts.tokens.astype(np.float64),
        start,
        float(most_tokens),
    )


@njit()
def _longest_first(tail_seconds, tail_tokens, short_seconds, short_tokens, start, most_tokens):
    tails, shorts = len(tail_seconds), len(short_seconds)
    count = len(start)
    seconds = np.zeros(count + shorts)
    tokens = np.zeros(count + shorts)
    bucket = np.empty(tails + shorts, dtype=np.int64)
    seconds[:count] = start
    for t in range(tails):
        seconds[t], tokens[t], bucket[t] = tail_seconds[t], tail_tokens[t], t
    for q in range(shorts):
        chosen = count
        for b in range(count):
            if tokens[b] + short_tokens[q] <= most_tokens and (
                chosen == count or seconds[b] < seconds[chosen]
            ):
                chosen = b
        if chosen == count:
            count += 1
        seconds[chosen] += short_seconds[q]
        tokens[chosen] += short_tokens[q]
        bucket[tails + q] = chosen
    # Remove the bins that stayed empty.
    number = np.full(count, -1, dtype=np.int64)
    used = 0
    for b in range(count):
        if tokens[b] > 0:
            number[b] = used
            used += 1
    for item in range(tails + shorts):
        bucket[item] = number[bucket[item]]
    return bucket, used


def first_fit(cuts: Cuts, most_tokens: float) -> tuple[np.ndarray, int]:
    """Pack tails and short documents first-fit, longest first; return bins and number of bins."""
    tails, shorts = (part.tokens.astype(np.float64) for part in (cuts.tails, cuts.shorts))
    at_once = np.zeros_like(tails), tails, np.zeros_like(shorts), shorts, np.zeros_like(tails)
    return _longest_first(*at_once, float(most_tokens))  # with all times 0
