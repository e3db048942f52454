"""The ``epp`` planner, which chooses chunks, order and recompute by exact simulation.

The planner also plans the published schedules that support the placement, and returns the fastest
plan of all. Batches with shared prefixes are planned by the search alone.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Kind
from megatron_epp.planner.epp import progress
from megatron_epp.planner.epp.player import Candidate
from megatron_epp.planner.epp.preparation import OPS_PER_EFFORT, PreparedChunkings
from megatron_epp.planner.epp.search import TIE, Search
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.options import EFFORT, MANY_EFFORT, Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.emit_block import most_host_bytes
from megatron_epp.planner.order.list_scheduler import list_schedule
from megatron_epp.planner.order.policies import policy_of
from megatron_epp.planner.order.replay import merged
from megatron_epp.planner.published import schedules
from megatron_epp.planner.published.infinipipe import planner as infinipipe
from megatron_epp.planner.recompute.offload import HostHeadroom
from megatron_epp.planner.recompute.uniform import ScoredDraft

# Number of budgets tried, between LEAST and the memory of the best plan.
BISECTIONS = 5
LESS_MEMORY = ", ordered for less memory"
LEAST = 0.25  # lower end of the bisection, as a fraction of the best plan's memory

# With tight memory, retry with more effort, up to EFFORT, while the plan is more than 5% above its
# lower bound. With an effort of 16, iterations of 512 documents of 13B on devices of 40 GiB took
# 0.2% less time (0.9% with vocabulary parallelism), but planning took two to four times as long.
FAR = 1.05
# Skip the split-backward search of a variant that is more than 1% slower with unsplit backwards.
FAR_SLOWER = 1.01


class SharedChunkings(defaultdict[tuple[bool, HostHeadroom], PreparedChunkings]):
    """Prepared chunkings of one batch, shared by searches with different levers.

    Keys are pairs: whether layers may be offloaded, and the limit of host memory. ``split`` is
    whether any search splits backwards. ``unsplit`` maps sets of levers without `wsplit` to the
    best candidate found with them.
    """

    def __init__(self, split: bool):
        super().__init__(dict)
        self.split = split
        self.unsplit: dict[frozenset[str], Candidate] = {}

    def keep_unsplit(self, levers: frozenset[str], candidate: Candidate) -> None:
        """Keep the better of ``candidate`` and the kept candidate."""
        known = self.unsplit.get(levers, candidate)
        self.unsplit[levers] = min(known, candidate, key=lambda each: each.rank)


def draft(batch: SortedBatch, cost: Cost, options: Options) -> ScoredDraft:
    """Return the fastest plan, as arrays, that the search finds within the memory budget.

    If no plan fits, return the plan that exceeds the budget least.
    """
    _report_expected(cost, options)
    searched = _searched(batch, cost, options)
    candidates = list(searched)
    if not cost.layout.place and not batch.trees:
        fitting = [scored.seconds for scored in candidates if scored.over_bytes <= 0]
        theirs = infinipipe.draft(batch, cost, options, min(fitting, default=np.inf))
        candidates += [] if theirs is None else [theirs]
    for other in _others(cost, options) if not batch.trees else ():
        fitting = [scored.seconds for scored in candidates if scored.over_bytes <= 0]
        drafted = other(batch, cost, options, min(fitting, default=np.inf))
        if drafted is not None:
            candidates.append(drafted)
    best = min(candidates, key=lambda candidate: candidate.rank)
    if (
        (best.draft.counts or best.over_bytes > 0)
        and not any(best is each for each in searched)
        and EFFORT <= options.search_effort < MANY_EFFORT
    ):
        # Memory is tight and a published schedule beats our search, which missed chunkings that fit
        # well.
        many = dataclasses.replace(options, effort=MANY_EFFORT)
        _report_expected(cost, many)
        more = _searched(batch, cost, many)
        best = min([best, *more], key=lambda candidate: candidate.rank)
    return best


def _report_expected(cost: Cost, options: Options) -> None:
    """Report the effort of another search."""
    searches = len(_sets(options.levers, cost)) * (2 if can_be_local(cost, options) else 1)
    progress.report_effort(expected=searches * options.search_effort * OPS_PER_EFFORT)


def _others(cost: Cost, options: Options) -> list[Callable[..., ScoredDraft | None]]:
    """Return the draft functions of the published schedules that levers and placement allow."""
    place, halves = cost.layout.placement.place, "wsplit" in options.levers
    rows = [schedules.SEQ1F1B, schedules.CHUNKFLOW, schedules.PACKING_BEST, schedules.ADAPTIS]
    rows += [schedules.SLIMPIPE, schedules.MEGATRON]
    if halves:
        rows.append(dataclasses.replace(schedules.ZB_V, chunkings=schedules.packed_to_lengths))
    return [partial(row.draft, split=halves) for row in rows if row.takes(place)]


def _searched(batch: SortedBatch, cost: Cost, options: Options) -> list[ScoredDraft]:
    """Return the drafts (plans as arrays) of the ``epp`` planner's own searches.

    Plans with unsplit backwards come first, so a plan with split backwards must be faster to be
    chosen: I and W take longer than B on some machines, and hold more memory on all machines.
    Likewise, a plan with offloading must be faster than a plan without. Offloading is tried only if
    an earlier plan had to recompute for lack of memory.

    Plans with single-rank documents are searched first. If the best of them is faster than the
    lower bound of all plans that shard every document, the search ends. Otherwise, plans that shard
    every document are searched too. This second search ends at a set of levers whose best plan
    takes FAR_SLOWER times as long as the best plan of the first set.
    """
    if batch.trees:  # documents with prefixes are sharded over all ranks
        options = dataclasses.replace(options, levers=options.levers - {"local"})
    tables = SharedChunkings("wsplit" in options.levers)
    sharded_only = dataclasses.replace(options, levers=options.levers - {"local"})
    if not can_be_local(cost, options):
        return list(_by_set(batch, cost, sharded_only, tables))
    every = list(_by_set(batch, cost, options, tables))
    fitting = min((scored.seconds for scored in every if scored.over_bytes <= 0), default=math.inf)
    if fitting < lower_bound_seconds(batch.lengths, cost):
        return every
    over, seconds = every[0].rank
    for scored in _by_set(batch, cost, sharded_only, tables):
        every.append(scored)
        if scored.rank > (over, seconds * FAR_SLOWER):
            break
    return every


def _by_set(
    batch: SortedBatch, cost: Cost, options: Options, tables: SharedChunkings
) -> Iterator[ScoredDraft]:
    """Yield the best draft of each set of levers; sets without split backwards are first."""
    tight = False
    for levers in _sets(options.levers, cost):
        if "offload" in levers and not tight:
            continue
        best = _persistent(batch, cost, dataclasses.replace(options, levers=levers), tables)
        tight = tight or bool(best.draft.counts)
        yield best


def can_be_local(cost: Cost, options: Options) -> bool:
    """Return whether single-rank documents (of one context-parallel rank) can save time.

    The result is False without the lever `local`, or if the layers have no all-to-all between
    context-parallel ranks. It is also False for replicas in lockstep, which shard all documents.
    """
    if "local" not in options.levers or options.lockstep > 1:
        return False
    return bool(cost.seconds.exchange_per_token[Kind.FORWARD].any())


def _sets(levers: frozenset[str], cost: Cost) -> list[frozenset[str]]:
    """Return the subsets of ``levers`` to search with, in the order of the searches."""
    on_device = levers - {"offload"}
    sets = [on_device - {"wsplit"}, on_device]
    if cost.layout.profile.host_bytes_per_second > 0:
        sets += [levers - {"wsplit"}, levers]
    return list(dict.fromkeys(sets))


def _persistent(
    batch: SortedBatch, cost: Cost, options: Options, tables: SharedChunkings
) -> ScoredDraft:
    """Return the best draft of the search, which gets more effort if memory is tight.

    Memory is tight if the draft recomputes layers or does not fit. The effort then rises, up to
    EFFORT, until the draft takes at most FAR times the lower bound. With little effort, a search
    can miss every chunking that fits well, and find only a draft that is several times too slow.
    """
    best = _own(batch, cost, options, tables)
    effort = options.search_effort
    while effort < EFFORT and (best.draft.counts or best.over_bytes > 0):
        local = "local" in options.levers
        bound = lower_bound_seconds(batch.lengths, cost, local=local, starts=batch.starts)
        if best.over_bytes <= 0 and best.seconds <= bound * FAR:
            break
        effort = min(max(1, 2 * effort), EFFORT)
        other = _own(batch, cost, dataclasses.replace(options, effort=effort), tables)
        best = min(best, other, key=lambda each: each.rank)
    return best


def _own(batch: SortedBatch, cost: Cost, options: Options, tables: SharedChunkings) -> ScoredDraft:
    """Return the best draft whose offloaded layers fit in host memory."""
    host = HostHeadroom(cost.host_budget_bytes)
    while True:
        shared = tables["offload" in options.levers, host]
        search = Search(batch, cost, options, tables.split, shared, host)
        best = search.run()
        if search.split:
            best = search.split_late((best, tables.unsplit[options.levers - {"wsplit"}]))
        candidate = least_memory(search, best)
        drafted = candidate.draft()
        taken = most_host_bytes(batch, drafted, cost)
        if taken <= cost.host_budget_bytes:
            if not search.split:
                tables.keep_unsplit(options.levers, best)
            return ScoredDraft(candidate.seconds, candidate.over_bytes, drafted)
        assert not host.at_once, "all that is offloaded fits at once"
        host = host.narrower(taken, cost.host_budget_bytes)


# ------------------------------------------------------------------ plans of nearly equal time


def least_memory(search: Search, fastest: Candidate) -> Candidate:
    """Return the plan of lowest peak memory, at most 1 + ``TIE`` times as slow as ``fastest``.

    If ``fastest`` does not fit in memory, it is returned. The plan is first chosen among the
    candidates that ``search`` knows. Bisection then finds a smaller memory budget within which the
    same chunks and policy give a plan that is fast enough.
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
    if candidate.policy.split:
        schedule = merged(smaller, schedule)
    over = max(0.0, float((schedule.peak_bytes - work.headroom_bytes).max()))
    return dataclasses.replace(
        candidate,
        seconds=schedule.seconds,
        over_bytes=over,
        schedule=dataclasses.replace(schedule, over_bytes=over),
        name=candidate.name.removesuffix(LESS_MEMORY) + LESS_MEMORY,
    )
