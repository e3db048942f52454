"""FlexSP: in every micro-batch, sequence-parallel groups of different sizes; no pipeline.

The sequence blaster sorts documents by length and cuts the batch into micro-batches of about equal
tokens. Each micro-batch is solved separately: it is divided into groups, and documents are assigned
to groups, such that the slowest group is as fast as possible. The paper solves a MILP over buckets
of lengths. Here, for every mix of group sizes that are powers of two, documents in descending
length go to the group that finishes first; moves and swaps then improve the best mixes. Tests keep
the result within 2% of the MILP. The method assumes perfect balance inside a group and free
switching of groups, so it is an optimistic baseline.
"""

import functools
from collections.abc import Sequence

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import PlanError
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.sim.jit import njit

from .costs import GroupCosts, MicroBatch, PlannedGroups, group_costs, planned_groups

MORE_BATCHES = 5  # M' of the blaster: M_min to M_min + 4
IMPROVED = 4  # mixes whose assignment is improved
SHAKEN = 16  # documents that are moved to shake a local optimum
# Static recompute to try, as shares of the layers; the paper's runs use 0, and 0.6 for 30B.
RECOMPUTE_FRACTIONS = (0.0, 0.3, 0.6, 1.0)


def plan(lengths: Sequence[int], cost: Cost, options: Options) -> PlannedGroups:
    """Return the best result over micro-batch counts and fractions of static recompute."""
    batch, cost = SortedBatch.of(lengths), cost.with_vocabulary(False)
    best = None
    layers = sum(cost.layout.layers)
    for share in RECOMPUTE_FRACTIONS:
        recompute = round(share * layers)
        costs = group_costs(cost, recompute)
        if batch.lengths[0] > costs.most_tokens[-1]:
            continue  # the longest document needs more recompute
        for count in _batch_counts(batch.lengths, costs):
            solved = _solve_all(batch.lengths, count, costs)
            if solved is None:
                continue
            batches, seconds = solved
            if best is None or seconds < best[0]:
                note = f"{count} micro-batches"
                note += f", recompute {recompute} of {layers} layers" if recompute else ""
                best = seconds, batches, costs, note
    if best is None:
        longest = int(batch.lengths[0])
        raise PlanError(
            f"a document of {longest} tokens does not fit all "
            f"{cost.layout.stages * cost.layout.cp} devices together with everything recomputed: "
            "raise the memory budget or use more devices"
        )
    _, batches, costs, note = best
    return planned_groups("flexsp", batches, batch.lengths, batch.names, costs, cost, note)


def _batch_counts(lengths: np.ndarray, costs: GroupCosts) -> range:
    capacity = float(costs.most_tokens[-1])
    least = max(1, int(np.ceil(lengths.sum() / capacity)))
    return range(least, min(least + MORE_BATCHES, len(lengths) + 1))


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


def _solve_all(
    lengths: np.ndarray, count: int, costs: GroupCosts
) -> tuple[list[MicroBatch], float] | None:
    batches: list[MicroBatch] = []
    total = 0.0
    for run in blast(lengths, count):
        solved = solve(lengths[run], costs)
        if solved is None:
            return None
        which, group_of, seconds = solved
        groups = [run[group_of == group] for group in range(len(which))]
        used = [number for number, held in enumerate(groups) if len(held)]
        batches.append((which[used], [groups[number] for number in used]))
        total += seconds
    return batches, total


def solve(lengths: np.ndarray, costs: GroupCosts) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Return (degree number of each group, group of each document, seconds) for one micro-batch.

    ``lengths`` are sorted in descending order. Return None if no mix of groups can hold the
    documents.
    """
    mixes = _mixes(len(costs.degrees))
    pairs = costs.pairs(lengths)
    tokens = lengths.astype(np.float64)
    table = (
        costs.token_seconds,
        costs.pair_seconds,
        costs.chunk_seconds,
        costs.most_tokens,
    )
    starts, degrees = mixes
    makespans = _all_mixes(starts, degrees, tokens, pairs, *table)
    best = None
    for mix in np.argsort(makespans, kind="stable")[:IMPROVED]:
        if makespans[mix] == np.inf:
            break
        which = degrees[starts[mix] : starts[mix + 1]]
        group_of = np.empty(len(lengths), dtype=np.int64)
        _assign(which, tokens, pairs, *table, group_of)
        seconds = _shaken(which, tokens, pairs, *table, group_of)
        if best is None or seconds < best[2]:
            best = which, group_of, seconds
    return best


@functools.cache
def _mixes(powers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return every way to divide 2^(powers - 1) devices into groups of powers of two.

    The result is (first index of each mix, degree numbers of all mixes); numbers descend in a mix.
    """
    found: list[list[int]] = []

    def extend(left: int, largest: int, mix: list[int]) -> None:
        if left == 0:
            found.append(mix)
            return
        for power in range(largest, -1, -1):
            if 2**power <= left:
                extend(left - 2**power, power, [*mix, power])

    extend(2 ** (powers - 1), powers - 1, [])
    starts = np.cumsum([0] + [len(mix) for mix in found])
    return starts, np.array([power for mix in found for power in mix], dtype=np.int64)


@njit()
def _all_mixes(starts, degrees, tokens, pairs, token_s, pair_s, chunk_s, most):
    count = len(starts) - 1
    makespans = np.empty(count)
    group_of = np.empty(len(tokens), dtype=np.int64)
    for mix in range(count):
        which = degrees[starts[mix] : starts[mix + 1]]
        makespans[mix] = _assign(which, tokens, pairs, token_s, pair_s, chunk_s, most, group_of)
    return makespans


@njit()
def _assign(which, tokens, pairs, token_s, pair_s, chunk_s, most, group_of):
    """Assign documents in descending length to the group that finishes first; return the time."""
    groups = len(which)
    seconds = np.zeros(groups)
    held = np.zeros(groups)
    for d in range(len(tokens)):
        chosen, least = -1, np.inf
        for g in range(groups):
            w = which[g]
            if held[g] + tokens[d] > most[w]:
                continue
            done = seconds[g] + token_s[w] * tokens[d] + pair_s[w] * pairs[d]
            if held[g] == 0:
                done += chunk_s[w]
            if done < least:
                chosen, least = g, done
        if chosen < 0:
            return np.inf
        seconds[chosen] = least
        held[chosen] += tokens[d]
        group_of[d] = chosen
    return seconds.max()


@njit()
def _shaken(which, tokens, pairs, token_s, pair_s, chunk_s, most, group_of):
    """Return the best time over several local optima; ``group_of`` becomes the best assignment.

    Each document in turn is moved to every other group, and the result is improved again.
    """
    best = _improve(which, tokens, pairs, token_s, pair_s, chunk_s, most, group_of)
    for d in range(min(len(tokens), SHAKEN)):
        for g in range(len(which)):
            trial = group_of.copy()
            held = tokens[d]
            for e in range(len(tokens)):
                if trial[e] == g:
                    held += tokens[e]
            if g == trial[d] or held > most[which[g]]:
                continue
            trial[d] = g
            seconds = _improve(which, tokens, pairs, token_s, pair_s, chunk_s, most, trial)
            if seconds < best:
                best = seconds
                group_of[:] = trial
    return best


@njit()
def _improve(which, tokens, pairs, token_s, pair_s, chunk_s, most, group_of):
    """Move and swap documents of the slowest group while this helps; return the time."""
    groups, documents = len(which), len(tokens)
    for _ in range(4 * documents):
        seconds = np.zeros(groups)
        held = np.zeros(groups)
        for d in range(documents):
            w = which[group_of[d]]
            seconds[group_of[d]] += token_s[w] * tokens[d] + pair_s[w] * pairs[d]
            held[group_of[d]] += tokens[d]
        for g in range(groups):
            if held[g] > 0:
                seconds[g] += chunk_s[which[g]]
        slow = np.argmax(seconds)
        ws = which[slow]
        best, mover, target, partner = seconds[slow], -1, -1, -1
        for d in range(documents):
            if group_of[d] != slow:
                continue
            out = token_s[ws] * tokens[d] + pair_s[ws] * pairs[d]
            for g in range(groups):
                if g == slow:
                    continue
                w = which[g]
                into = token_s[w] * tokens[d] + pair_s[w] * pairs[d]
                if held[g] + tokens[d] <= most[w]:
                    new = max(
                        seconds[slow] - out,
                        seconds[g] + into + (chunk_s[w] if held[g] == 0 else 0.0),
                    )
                    if new < best - 1e-12:
                        best, mover, target, partner = new, d, g, -1
                for e in range(documents):
                    if group_of[e] != g:
                        continue
                    if (
                        held[g] - tokens[e] + tokens[d] > most[w]
                        or held[slow] - tokens[d] + tokens[e] > most[ws]
                    ):
                        continue
                    new = max(
                        seconds[slow] - out + token_s[ws] * tokens[e] + pair_s[ws] * pairs[e],
                        seconds[g] + into - token_s[w] * tokens[e] - pair_s[w] * pairs[e],
                    )
                    if new < best - 1e-12:
                        best, mover, target, partner = new, d, g, e
        if mover < 0:
            return seconds[slow]
        group_of[mover] = target
        if partner >= 0:
            group_of[partner] = slow
    return seconds.max()
