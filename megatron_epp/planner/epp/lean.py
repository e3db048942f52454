"""Ties broken towards less memory: room that buys no time is room for what nobody foresaw."""

import dataclasses

import numpy as np

from megatron_epp.planner.epp.player import Candidate
from megatron_epp.planner.epp.search import Search
from megatron_epp.planner.order.list_scheduler import list_schedule
from megatron_epp.planner.order.policies import policy_of

TIE = 0.005  # of the time: no cost model is that exact
# Budgets that are tried between the least that an order could need and what the fastest takes.
BISECTIONS = 5
_SAID = ", lean"
LEAST = 0.25  # of what the fastest takes: where the search for less begins


def leanest(search: Search, fastest: Candidate) -> Candidate:
    """The plan that fills least of its fullest stage, among those that take at most ``TIE`` longer
    than ``fastest``; ``fastest`` where it does not fit itself.

    Looked at are all that ``search`` met, then the orders that the winner's policy leads to within
    smaller budgets, by bisection.
    """
    if fastest.over_bytes > 0:
        return fastest
    most = fastest.seconds * (1 + TIE)
    ties = [
        found for found in search.known.values() if found.over_bytes <= 0 and found.seconds <= most
    ]
    best = min([fastest, *ties], key=lambda found: (_filled(found), found.seconds))
    high = _filled(best)
    low = LEAST * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        tried = _within(search, best, middle)
        if tried.seconds <= most and _filled(tried) < _filled(best):
            best, high = tried, min(middle, _filled(tried))
        else:
            low = middle
    return best


def _filled(found: Candidate) -> float:
    """The share of its headroom that the fullest stage takes."""
    headroom = np.maximum(found.prepared.work.headroom_bytes, 1.0)
    return float((found.schedule.peak_bytes / headroom).max())


def _within(search: Search, found: Candidate, share: float) -> Candidate:
    """``found``'s chunks and policy, had every stage only that share of its headroom."""
    work = found.prepared.work
    smaller = dataclasses.replace(work, headroom_bytes=work.headroom_bytes * share)
    policy = policy_of(
        found.policy, smaller, found.prepared.chunking.sizes, found.prepared.min_in_flight
    )
    search.effort.spend(work.stages * work.chunks * (3 if found.policy.split else 2))
    schedule = list_schedule(smaller, policy)
    over = max(0.0, float((schedule.peak_bytes - work.headroom_bytes).max()))
    return dataclasses.replace(
        found,
        seconds=schedule.seconds,
        over_bytes=over,
        schedule=dataclasses.replace(schedule, over_bytes=over),
        name=found.name.removesuffix(_SAID) + _SAID,
    )
