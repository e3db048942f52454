"""List scheduling: every rank, whenever it is free, takes the op that its policy likes best.

Forwards run in chunk order and backwards in theirs on every stage, so a policy only says which of
three is next: the next F, the next B (or I), the oldest waiting W. Where a rank has several stages,
it takes them in turn: an F of its last one that can run one, or of its first (``deep``); a B, H, W
or G of its first. Memory is charged as the rule table says, to the rank; an F that would leave it
without room to run its backwards waits.

With vocabulary parallelism an H runs as soon as its stage is free and what it needs has come: the
other stages' H of that chunk wait for it, and the last stage's B for all of them. G waits for a
gap, as W does, and goes first where W does.
"""

from dataclasses import dataclass

import numpy as np

from megatron_epp.planner.order.compiled import (
    G,
    PolicyArrays,
    Problem,
    replay_of,
    schedule_with,
    strict_orders,
)
from megatron_epp.planner.order.problem import ScheduleProblem

# Where backwards are whole, G alone fills gaps: so many wait at most, in the mean seconds of one,
# and a gap may be overrun by that share of one. By hand.
HELD_HEADS = 4
HEAD_PATIENCE = 0.6


@dataclass(frozen=True, slots=True)
class Policy:
    """Preferences of a rank, by the forwards and backwards of all its stages together.

    least[rank][k]    forwards that must have run before backward k of that rank
    first[rank][k]    while k backwards have run, an F goes before a B below this many forwards
    most[rank][k]     while k backwards have run, no F beyond this many forwards
    split             run I and W instead of B
    held_seconds      a W or G goes first where this much of their work already waits on the stage
    patience          a W or G starts only if it ends at most this share of itself after the next
                      awaited input
    deep              of several stages' F the last stage's, else the first's
    A strict order has least = first = most; without a split nothing is left to choose then, so
    memory is measured and does not hold an op back. Where B is whole, what is said of W here is
    HELD_HEADS and HEAD_PATIENCE of G.
    """

    least: np.ndarray
    first: np.ndarray
    most: np.ndarray
    split: bool = False
    held_seconds: float = np.inf
    patience: float = 0.0
    deep: bool = True


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ops of each rank, and when they run; ranks of fewer stages have empty places at the end.

    kinds, chunks   [ranks, ops] codes of kinds (ir.KIND_CODE), and chunks
    stages          [ranks, ops] the stage of each; no columns where stage i lies on rank i
    start, stop     [ranks, ops] seconds
    peak_bytes      [ranks] beside residents
    """

    seconds: float
    peak_bytes: np.ndarray
    over_bytes: float  # the most that any rank is above its budget, 0 if none
    kinds: np.ndarray
    chunks: np.ndarray
    stages: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def list_schedule(work: ScheduleProblem, policy: Policy) -> Schedule:
    """The orders that ``policy`` leads to, and what playing them takes."""
    fixed = policy.least is policy.most and not policy.split
    if fixed and not work.vocabulary_parallel and not work.place:
        # Nothing is left to choose, and replaying takes a fraction of the loop below.
        kinds, chunks, complete = strict_orders(
            policy.least, work.backward_order, work.last_of_group
        )
        if complete:
            ops = work.ops
            seconds, peaks, start, stop = replay_of(
                ops.seconds, ops.link_seconds, ops.latency, ops.moved_bytes, kinds, chunks
            )
            over = max(0.0, float((peaks - work.headroom_bytes).max()))
            stages = np.zeros((len(kinds), 0), np.int32)
            return Schedule(seconds, peaks, over, kinds, chunks, stages, start, stop)
    held_seconds, patience = policy.held_seconds, policy.patience
    if work.vocabulary_parallel and not policy.split:
        held_seconds = HELD_HEADS * float(work.ops.seconds[G].mean())
        patience = HEAD_PATIENCE
    rank_of = np.array(work.place or range(work.stages), np.int64)
    problem = Problem(
        work.ops.seconds,
        work.ops.link_seconds,
        work.ops.latency,
        work.ops.moved_bytes,
        work.backward_order,
        work.last_of_group,
        np.full(len(work.headroom_bytes), np.inf) if fixed else work.headroom_bytes,
        rank_of,
        np.argsort(rank_of, kind="stable"),
        bool(work.place),
    )
    limits = PolicyArrays(
        policy.least,
        policy.first,
        policy.most,
        policy.split,
        work.vocabulary_parallel,
        held_seconds,
        patience,
        policy.deep,
    )
    seconds, peaks, *ops = schedule_with(problem, limits)
    over = max(0.0, float((peaks - work.headroom_bytes).max()))
    return Schedule(seconds, peaks, over, *ops)
