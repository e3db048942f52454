"""Choice of the plan with the lowest peak memory among plans of nearly equal time."""

import dataclasses

import numpy as np

from megatron_epp.planner.epp.player import Candidate
from megatron_epp.planner.epp.search import TIE, Search
from megatron_epp.planner.order.list_scheduler import list_schedule
from megatron_epp.planner.order.policies import policy_of

# Number of budgets tried, between LEAST and the memory of the best plan.
BISECTIONS = 5
_REPORTED_GAIN = ", lean"
LEAST = 0.25  # lower end of the bisection, as a fraction of the best plan's memory


def least_memory(search: Search, fastest: Candidate) -> Candidate:
    """Return the plan of lowest peak memory, at most 1 + ``TIE`` times as slow as ``fastest``.

    If ``fastest`` does not fit, return ``fastest``. Candidates are all plans that ``search`` has
    simulated. Bisection then finds the smallest budget within which the best candidate's chunks
    and policy give a plan that is at most as slow.
    """
    if fastest.over_bytes > 0:
        return fastest
    most = fastest.seconds * (1 + TIE)
    ties = [
        candidate
        for candidate in search.known.values()
        if candidate.over_bytes <= 0 and candidate.seconds <= most
    ]
    best = min([fastest, *ties], key=lambda candidate: (_filled(candidate), candidate.seconds))
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


def _filled(candidate: Candidate) -> float:
    """Return the maximum over the ranks of peak bytes, as a fraction of the rank's headroom."""
    headroom = np.maximum(candidate.prepared.work.headroom_bytes, 1.0)
    return float((candidate.schedule.peak_bytes / headroom).max())


def _within(search: Search, candidate: Candidate, fraction: float) -> Candidate:
    """Return ``candidate`` rescheduled within ``fraction`` of its headroom, by the same policy."""
    work = candidate.prepared.work
    smaller = dataclasses.replace(work, headroom_bytes=work.headroom_bytes * fraction)
    policy = policy_of(candidate.policy, smaller, candidate.prepared.min_in_flight)
    search.effort.spend(work.stages * work.chunks * (3 if candidate.policy.split else 2))
    schedule = list_schedule(smaller, policy)
    over = max(0.0, float((schedule.peak_bytes - work.headroom_bytes).max()))
    return dataclasses.replace(
        candidate,
        seconds=schedule.seconds,
        over_bytes=over,
        schedule=dataclasses.replace(schedule, over_bytes=over),
        name=candidate.name.removesuffix(_REPORTED_GAIN) + _REPORTED_GAIN,
    )
