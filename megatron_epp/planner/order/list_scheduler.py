"""List scheduling: every stage, whenever it is free, takes the op that its policy likes best.

Forwards run in chunk order and backwards in theirs on every stage, so a policy only says which of
three is next: the next F, the next B (or I), the oldest waiting W. Memory is charged as the rule
table says; an F that would leave the stage without room to run its backwards waits.

With vocabulary parallelism an H runs as soon as its stage is free and what it needs has come: the
other stages' H of that chunk wait for it, and the last stage's B for all of them. G waits for a
gap, as W does, and goes first where W does.
"""

from dataclasses import dataclass

import numpy as np

from megatron_epp.planner.order.compiled import G, schedule_with
from megatron_epp.planner.order.problem import ScheduleProblem

# Where backwards are whole, G alone fills gaps: so many wait at most, in the mean seconds of one,
# and a gap may be overrun by that share of one. By hand.
HELD_HEADS = 4
HEAD_PATIENCE = 0.6


@dataclass(frozen=True, slots=True)
class Policy:
    """Preferences of a stage.

    least[stage][k]   forwards that must have run before backward k of that stage
    first[stage][k]   while k backwards have run, an F goes before a B below this many forwards
    most[stage][k]    while k backwards have run, no F beyond this many forwards
    split             run I and W instead of B
    held_seconds      a W or G goes first where this much of their work already waits on the stage
    patience          a W or G starts only if it ends at most this share of itself after the next
                      awaited input
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


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ops of each stage, and when they run.

    kinds, chunks   [stages, ops] codes of kinds (ir.KIND_CODE), and chunks
    start, stop     [stages, ops] seconds
    peak_bytes      [stages] beside residents
    """

    seconds: float
    peak_bytes: np.ndarray
    over_bytes: float  # the most that any stage is above its budget, 0 if none
    kinds: np.ndarray
    chunks: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def list_schedule(work: ScheduleProblem, policy: Policy) -> Schedule:
    """The orders that ``policy`` leads to, and what playing them takes."""
    fixed = policy.least is policy.most and not policy.split
    held_seconds, patience = policy.held_seconds, policy.patience
    if work.vocabulary_parallel and not policy.split:
        held_seconds = HELD_HEADS * float(work.ops.seconds[G].mean())
        patience = HEAD_PATIENCE
    taken, peaks, kinds, chunks, start, stop = schedule_with(
        work.ops.seconds,
        work.ops.link_seconds,
        work.ops.latency,
        work.ops.moved_bytes,
        work.backward_order,
        work.last_of_group,
        np.full(work.stages, np.inf) if fixed else work.room_bytes,
        policy.least,
        policy.first,
        policy.most,
        policy.split,
        held_seconds,
        patience,
    )
    over = max(0.0, float((peaks - work.room_bytes).max()))
    return Schedule(taken, peaks, over, kinds, chunks, start, stop)
