"""The ``epp`` planner, which chooses chunks, order and recompute by exact simulation.

The planner also plans the published schedules, and returns the fastest plan of all.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import ANALYTIC
from megatron_epp.ir import Kind, PlanError
from megatron_epp.planner.choose.partition import LIKELY_CHUNKS, fastest_layers, with_layers
from megatron_epp.planner.epp import progress
from megatron_epp.planner.epp.player import Candidate
from megatron_epp.planner.epp.preparation import OPS_PER_EFFORT, PreparedChunkings
from megatron_epp.planner.epp.search import TIE, Search
from megatron_epp.planner.feasibility import no_plan_fits
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.options import EFFORT, MANY_EFFORT, Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.emit_block import (
    block_peaks,
    member_plans,
    most_host_bytes,
    tables_in_step,
)
from megatron_epp.planner.order.list_scheduler import list_schedule
from megatron_epp.planner.order.policies import policy_of
from megatron_epp.planner.published import schedules
from megatron_epp.planner.published.infinipipe import planner as infinipipe
from megatron_epp.planner.recompute.offload import HostHeadroom
from megatron_epp.planner.recompute.uniform import ScoredDraft
from megatron_epp.sim.play import play

# Number of budgets tried, between LEAST and the memory of the best plan.
BISECTIONS = 5
_REPORTED_GAIN = ", lean"
LEAST = 0.25  # lower end of the bisection, as a fraction of the best plan's memory

# With the paper's memory model (lever `exact` off) a plan may exceed the budget. The budget is then
# reduced by the excess and a little more, at most EXACT_TRIES times, because the exact peak depends
# on the plan. Chosen by hand.
EXACT_TRIES = 3
TIGHTENED_MORE = 1.02
# With tight memory, retry with more effort, up to EFFORT, while the plan is more than 5% above its
# lower bound. With an effort of 16, iterations of 512 documents of 13B on devices of 40 GiB took
# 0.2% less time (0.9% with vocabulary parallelism), but planning took two to four times as long.
FAR = 1.05
# Factors on the assumed host time with which plans are searched, as long as the time of a plan
# depends on the host (with an effort of 0 only the first). Of these plans, that one is chosen whose
# largest loss against the others is least, if hosts take HOSTS times as long as assumed. Chosen on
# the even jobs of scripts/bench/study_jobs.py; its results say what plans lose.
HEDGES = (1.6, 1.45, 0.85)
HOSTS = (0.5, 1.0, 2.0)
DEPENDS = 1.01  # ratio of a plan's times with the slowest and the fastest of these hosts
# Skip the split-backward search of a variant that is more than 1% slower with unsplit backwards.
FAR_SLOWER = 1.01


class SharedChunkings(
    defaultdict[tuple[bool, tuple[int, ...], tuple[float, ...], HostHeadroom], PreparedChunkings]
):
    """Prepared chunkings of one batch, shared by searches with different levers.

    Keys are (offloading, layers per stage, headroom in bytes, host memory). ``split``: whether any
    search splits backwards.
    """

    def __init__(self, split: bool):
        super().__init__(dict)
        self.split = split


def draft(batch: SortedBatch, cost: Cost, options: Options) -> ScoredDraft:
    """Return the fastest plan of the batch that the search finds within the memory budget.

    With the lever `hedge` and an analytic cost model, the function searches with several host
    times. If hosts are slower than assumed, too many chunks cost much time; if hosts are faster,
    too few chunks cost some time. The function returns the plan that loses least in the worst case.

    Raises:
        PlanError: if no plan of the batch fits.
    """
    if "hedge" not in options.levers or not _assumes_host_time(cost):
        _report_expected(cost, options)
        return _fastest(batch, cost, options)
    factors = HEDGES if options.search_effort else HEDGES[:1]
    _report_expected(cost, options, len(factors))
    drafts: list[tuple[ScoredDraft, np.ndarray]] = []
    for number, factor in enumerate(factors, 1):
        try:
            best = _fastest(batch, _with_hosts(cost, factor), options)
        except PlanError:  # memory is so tight that one search has a plan and another does not
            if drafts:
                break
            raise
        best = dataclasses.replace(best, cost=cost.replace(layers=best.cost.layout.layers))
        if len(factors) == 1:
            return best
        seconds = _seconds_by_host(batch, best)
        drafts.append((best, seconds))
        if seconds.max() < DEPENDS * seconds.min():
            _report_expected(cost, options, number - len(factors))
            break
    least = np.min([seconds for _, seconds in drafts], axis=0)
    best, _ = min(drafts, key=lambda each: (each[1] / least).max())
    return best


def _report_expected(cost: Cost, options: Options, times: int = 1) -> None:
    """Report the effort of ``times`` additional searches; a negative number cancels searches."""
    searches = len(_sets(options.levers, cost)) * (2 if can_be_local(cost, options) else 1)
    expected = searches * options.search_effort * OPS_PER_EFFORT
    progress.report_effort(expected=times * expected)


def _assumes_host_time(cost: Cost) -> bool:
    """Return whether hosts take time to issue ops, by an assumption rather than a measurement."""
    analytic = cost.layout.profile.provenance.kind == ANALYTIC
    return analytic and bool(cost.seconds.host[Kind.FORWARD].any())


def _with_hosts(cost: Cost, factor: float) -> Cost:
    """Return ``cost`` with the host time multiplied by ``factor``."""
    return cost.with_coefficients_times({"host_seconds": factor, "expert_host_seconds": factor})


def _seconds_by_host(batch: SortedBatch, scored: ScoredDraft) -> np.ndarray:
    """Return the simulated seconds [HOSTS] of a draft with each of the factors HOSTS."""
    members = member_plans(batch, scored.draft, scored.cost)
    tables = (
        tables_in_step(members, scored.draft, _with_hosts(scored.cost, factor))[0]
        for factor in HOSTS
    )
    return np.array([play(members[0].plan, table).seconds for table in tables])


def _fastest(batch: SortedBatch, cost: Cost, options: Options) -> ScoredDraft:
    searched = _searched(batch, cost, options)
    candidates = list(searched)
    if not cost.layout.place:
        fitting = [scored.seconds for scored in candidates if scored.over_bytes <= 0]
        theirs = infinipipe.draft_below(batch, cost, options, min(fitting, default=np.inf))
        candidates += [] if theirs is None else [theirs]
    # With the layers per stage of ``cost``, and with those of the best draft.
    moved = min(candidates, key=lambda candidate: candidate.rank, default=None)
    costs = [cost] if moved is None or moved.cost is cost else [cost, moved.cost]
    for layers, other in product(costs, _others(cost, options)):
        fitting = [scored.seconds for scored in candidates if scored.over_bytes <= 0]
        drafted = other(batch, layers, options, min(fitting, default=np.inf))
        if drafted is not None:
            candidates.append(drafted)
    best = min(candidates, key=lambda candidate: candidate.rank)
    if (
        (best.draft.counts or best.over_bytes > 0)
        and not any(best is each for each in searched)
        and "persist" in options.levers
        and EFFORT <= options.search_effort < MANY_EFFORT
    ):
        # Memory is tight and a published schedule beats our search, which missed chunkings that fit
        # well.
        many = dataclasses.replace(options, effort=MANY_EFFORT)
        _report_expected(cost, many)
        more = _searched(batch, cost, many)
        best = min([best, *more], key=lambda candidate: candidate.rank)
    if best.over_bytes > 0:
        peaks = block_peaks(batch, best.draft, best.cost).astype(np.int64)
        if (peaks > np.array(best.cost.device_budget_bytes)).any():
            raise no_plan_fits(best.cost, batch.documents, tuple(peaks.tolist()))
    return best


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
    lower bound of all plans that shard every document, the search ends, unless layers may move.
    Else plans that shard every document are searched too. This second search ends at a set of
    levers whose best plan takes FAR_SLOWER times as long as the best plan of the first set.
    """
    # The paper's memory model charges the memory held from I to W, whether backwards are split or
    # not.
    tables = SharedChunkings("wsplit" in options.levers or "exact" not in options.levers)
    sharded_only = dataclasses.replace(options, levers=options.levers - {"local"})
    if not can_be_local(cost, options):
        return [scored for each in _by_set(batch, cost, sharded_only, tables) for scored in each]
    local = list(_by_set(batch, cost, options, tables))
    every = [scored for each in local for scored in each]
    fitting = min((scored.seconds for scored in every if scored.over_bytes <= 0), default=math.inf)
    moves = options.open_layers and "uneven" in options.levers
    if not moves and fitting < lower_bound_seconds(batch.lengths, cost):
        return every
    over, seconds = min((scored.rank for scored in local[0]), default=(math.inf, math.inf))
    for each in _by_set(batch, cost, sharded_only, tables):
        every += each
        if min((scored.rank for scored in each), default=(0.0, 0.0)) > (over, seconds * FAR_SLOWER):
            break
    return every


def _by_set(
    batch: SortedBatch, cost: Cost, options: Options, tables: SharedChunkings
) -> Iterator[list[ScoredDraft]]:
    """Yield, for each set of levers to try, its drafts; sets without split backwards are first."""
    tight = False
    for levers in _sets(options.levers, cost):
        if "offload" in levers and not tight:
            continue
        chosen = dataclasses.replace(options, levers=levers)
        even, *moved = _even_and_moved(batch, cost, chosen, tables)
        tight = tight or even is None or bool(even.draft.counts)
        yield [scored for scored in (even, *moved) if scored is not None]


def can_be_local(cost: Cost, options: Options) -> bool:
    """Return whether it can save time to compute a document on one context-parallel rank.

    The result is False without the lever `local`, and for replicas in lockstep, which shard all
    documents.
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


def _even_and_moved(
    batch: SortedBatch, cost: Cost, options: Options, tables: SharedChunkings
) -> Iterator[ScoredDraft | None]:
    """Yield the best draft with the layers of ``cost``, then with layers moved between stages."""
    best = _persistent(batch, cost, options, tables)
    yield best
    if options.open_layers and "uneven" in options.levers:
        # With as many chunks as the plan with even layers has.
        chunks = best.draft.chunking.count if best else LIKELY_CHUNKS * cost.layout.stages
        layers = fastest_layers(cost, cost.layout.columns.batch_features(batch.lengths, chunks))
        moved = None if layers in (None, cost.layout.layers) else with_layers(cost, layers)
        if moved is not None:
            other = _persistent(batch, moved, options, tables)
            if other is not None:
                yield other


def _persistent(
    batch: SortedBatch, cost: Cost, options: Options, tables: SharedChunkings
) -> ScoredDraft | None:
    """Return the best draft of the search, which gets more effort if memory is tight.

    Memory is tight if the draft recomputes layers or if no draft fits. The effort then rises, up to
    EFFORT, until the draft takes at most FAR times the lower bound (lever `persist`). With little
    effort, a search can miss every chunking that fits well, and find only a draft that is several
    times too slow.
    """
    best = _own(batch, cost, options, tables)
    if "persist" not in options.levers:
        return best
    effort = options.search_effort
    while effort < EFFORT and (best is None or best.draft.counts or best.over_bytes > 0):
        bound = lower_bound_seconds(batch.lengths, cost, local="local" in options.levers)
        if best is not None and best.over_bytes <= 0 and best.seconds <= bound * FAR:
            break
        effort = min(max(1, 2 * effort), EFFORT)
        other = _own(batch, cost, dataclasses.replace(options, effort=effort), tables)
        drafts = [each for each in (best, other) if each is not None]
        best = min(drafts, key=lambda each: each.rank, default=None)
    return best


def _own(
    batch: SortedBatch, cost: Cost, options: Options, tables: SharedChunkings
) -> ScoredDraft | None:
    """Return the best draft whose offloaded layers fit in host memory, or None."""
    host = HostHeadroom(cost.host_budget_bytes)
    while True:
        best = _on_devices(batch, cost, options, tables, host)
        if best is None:
            return None
        taken = most_host_bytes(batch, best.draft, cost)
        if taken <= cost.host_budget_bytes:
            return best
        assert not host.at_once, "all that is offloaded fits at once"
        host = host.narrower(taken, cost.host_budget_bytes)


def _on_devices(
    batch: SortedBatch, cost: Cost, options: Options, tables: SharedChunkings, host: HostHeadroom
) -> ScoredDraft | None:
    headroom = cost.headroom_bytes
    for _ in range(EXACT_TRIES):
        shared = tables[
            "offload" in options.levers, cost.layout.layers, tuple(headroom.tolist()), host
        ]
        search = Search(batch, cost, options, tables.split, headroom, shared, host)
        candidate = search.run()
        if "lean" in options.levers:
            candidate = least_memory(search, candidate)
        drafted = candidate.draft()
        if "exact" in options.levers:
            return ScoredDraft(candidate.seconds, candidate.over_bytes, drafted, cost)
        exact = block_peaks(batch, drafted, cost)
        over = exact - np.array(cost.device_budget_bytes)
        if (over <= 0).all():
            return ScoredDraft(candidate.seconds, 0.0, drafted, cost)
        headroom = headroom - np.maximum(over, 0.0) * TIGHTENED_MORE
    return None


# ------------------------------------------------------------------ plans of nearly equal time


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
