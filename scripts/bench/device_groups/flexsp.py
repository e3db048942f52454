"""FlexSP: in every micro-batch, sequence-parallel groups of different sizes; no pipeline.

The sequence blaster sorts documents by length and cuts the batch into micro-batches of about equal
tokens. Each micro-batch is solved separately: it is divided into groups, and documents are assigned
to groups, such that the slowest group is as fast as possible. The paper solves a MILP over buckets
of lengths. Here, for every mix of group sizes that are powers of two, documents in descending
length go to the group that finishes first; moves and swaps then improve the best mixes. Tests keep
the result within 2% of the best assignment. The method assumes perfect balance inside a group and
free switching of groups, so it is an optimistic baseline.
"""

import functools
import math
from collections.abc import Iterator

import numpy as np

from megatron_epp.cost.columns import CHUNKS
from megatron_epp.sim.jit import njit

from .costs import GroupCosts, MicroBatch

MORE_BATCHES = 5  # M' of the blaster: M_min to M_min + 4
IMPROVED = 4  # mixes whose assignment is improved
SHAKEN = 16  # documents that are moved to shake a local optimum


def divide(lengths: np.ndarray, costs: GroupCosts) -> Iterator[tuple[str, list[MicroBatch]]]:
    """Yield a note and the micro-batches for every micro-batch count, if groups can hold them."""
    least = max(1, math.ceil(lengths.sum() / costs.most_tokens[-1]))
    for count in range(least, min(least + MORE_BATCHES, len(lengths) + 1)):
        batches: list[MicroBatch] = []
        for run in blast(lengths, count):
            solved = solve(lengths[run], costs)
            if solved is None:
                break
            which, group_of, _ = solved
            used = np.unique(group_of)
            batches.append((which[used], [run[group_of == group] for group in used]))
        else:
            yield f"{count} micro-batches", batches


def blast(lengths: np.ndarray, count: int) -> list[np.ndarray]:
    """Split documents, sorted by length, into ``count`` runs with the least maximum of tokens."""
    low, high = int(lengths.max()), int(lengths.sum())
    while low < high:
        middle = (low + high) // 2
        if len(_runs(lengths, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return _runs(lengths, low)


def _runs(lengths: np.ndarray, most: int) -> list[np.ndarray]:
    runs, start, held = [], 0, 0
    for number, length in enumerate(lengths.tolist()):
        if held + length > most and number > start:
            runs.append(np.arange(start, number))
            start, held = number, 0
        held += length
    runs.append(np.arange(start, len(lengths)))
    return runs


def solve(lengths: np.ndarray, costs: GroupCosts) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Return (degree number of each group, group of each document, seconds) for one micro-batch.

    ``lengths`` are sorted in descending order. Return None if no mix of groups can hold the
    documents.
    """
    tokens, adds = lengths.astype(np.float64), costs.document_seconds(lengths)
    table = tokens, adds, costs.seconds[:, CHUNKS].copy(), costs.most_tokens
    group_of = np.empty(len(lengths), dtype=np.int64)
    mixes = map(np.array, _mixes(costs.devices, costs.devices))
    fastest = sorted(mixes, key=lambda mix: _assign(mix, *table, group_of))[:IMPROVED]
    solved = []
    for mix in fastest:
        if _assign(mix, *table, group_of) < np.inf:
            seconds = _shaken(mix, *table, group_of)
            solved.append((mix, group_of.copy(), seconds))
    return min(solved, key=lambda each: each[2], default=None)


@functools.cache
def _mixes(devices: int, largest: int) -> tuple[tuple[int, ...], ...]:
    """Return every way to divide devices into groups of at most ``largest``: degree numbers."""
    if not devices:
        return ((),)
    return tuple(
        (power, *rest)
        for power in range(min(devices, largest).bit_length() - 1, -1, -1)
        for rest in _mixes(devices - 2**power, 2**power)
    )


@njit()
def _assign(which, tokens, adds, chunk, most, group_of):
    """Assign documents in descending length to the group that finishes first; return the time.

    Args:
        which: degree number of every group.
        tokens: [D] tokens of every document.
        adds: [D, N] seconds that a document adds to a group, by degree number.
        chunk: [N] other seconds of a group.
        most: [N] largest number of tokens of a group.
        group_of: [D] result: the group of every document.
    """
    groups = len(which)
    seconds = chunk[which]
    held = np.zeros(groups)
    for d in range(len(tokens)):
        chosen, least = -1, np.inf
        for g in range(groups):
            w = which[g]
            done = seconds[g] + adds[d, w]
            if held[g] + tokens[d] <= most[w] and done < least:
                chosen, least = g, done
        if chosen < 0:
            return np.inf
        seconds[chosen] = least
        held[chosen] += tokens[d]
        group_of[d] = chosen
    return seconds[held > 0].max()


@njit()
def _shaken(which, tokens, adds, chunk, most, group_of):
    """Return the best time over several local optima; ``group_of`` becomes the best assignment.

    Each document in turn is moved to every other group, and the result is improved again.
    """
    best = _improve(which, tokens, adds, chunk, most, group_of)
    for d in range(min(len(tokens), SHAKEN)):
        for g in range(len(which)):
            if g == group_of[d] or tokens[d] + tokens[group_of == g].sum() > most[which[g]]:
                continue
            trial = group_of.copy()
            trial[d] = g
            seconds = _improve(which, tokens, adds, chunk, most, trial)
            if seconds < best:
                best = seconds
                group_of[:] = trial
    return best


@njit()
def _improve(which, tokens, adds, chunk, most, group_of):
    """Move and swap documents of the slowest group while this helps; return the time."""
    groups, documents = len(which), len(tokens)
    for _ in range(4 * documents):
        seconds, held = np.zeros(groups), np.zeros(groups)
        for d in range(documents):
            seconds[group_of[d]] += adds[d, which[group_of[d]]]
            held[group_of[d]] += tokens[d]
        seconds[held > 0] += chunk[which[held > 0]]
        slow = np.argmax(seconds)
        ws = which[slow]
        best, mover, target, partner = seconds[slow], -1, -1, -1
        for d in range(documents):
            if group_of[d] != slow:
                continue
            for g in range(groups):
                w = which[g]
                for e in range(-1, documents):  # -1: d is moved, else swapped with e
                    if g == slow or (e >= 0 and group_of[e] != g):
                        continue
                    moved = tokens[d] - (tokens[e] if e >= 0 else 0.0)
                    lost = adds[d, ws] - (adds[e, ws] if e >= 0 else 0.0)
                    gained = adds[d, w] - (adds[e, w] if e >= 0 else 0.0)
                    if held[g] + moved > most[w] or held[slow] - moved > most[ws]:
                        continue
                    if held[g] == 0:
                        gained += chunk[w]
                    new = max(seconds[slow] - lost, seconds[g] + gained)
                    if new < best - 1e-12:
                        best, mover, target, partner = new, d, g, e
        if mover < 0:
            return seconds[slow]
        group_of[mover] = target
        if partner >= 0:
            group_of[partner] = slow
    return seconds.max()
