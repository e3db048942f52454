"""Search over layouts (parallel degrees of a job), in five steps.

    bound    lower bound of each layout: no layer partition and no schedule is faster
    glance   first feasible plan of one batch, most promising layouts first. For n wanted results,
             layouts whose bound exceeds the n-th best time so far are left out
    sketch   plans of that batch with little effort, for layouts whose first plan is nearly best and
             recomputes nothing, with the layers and the LM head of that plan
    stages   placement, layers and LM head of the best layouts, chosen for that batch
    finals   the best of them, planned on all batches with the full effort. Other layouts rank
             after them, with the seconds of their first batch scaled to all batches

Plans are made for the replica with the most work, because the other replicas wait for this replica.
If replicas run in lockstep because they share experts, plans are made for the lockstep group with
the most work. Stages have the same number of layers, or layers balanced by time (planner.choose) if
that is faster. The LM head is on the last stage, or uses vocabulary parallelism if this is
requested or faster.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import batched
from typing import Any

import numpy as np

from megatron_epp.cost.columns import CHUNKS
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Kind, Plan
from megatron_epp.ir.placement import Placement
from megatron_epp.planner.choose.choice import (
    PLACEMENT_NAMES,
    SKETCH_EFFORT,
    heaviest,
    padded_words,
    ruled_out,
    run_choice,
    with_placement,
)
from megatron_epp.planner.choose.partition import (
    expected_features,
    fastest_layers,
    layer_costs,
    with_layers,
)
from megatron_epp.planner.choose.slow_hosts import assumes_host_time, slow_host_line
from megatron_epp.planner.epp.planner import can_be_local
from megatron_epp.planner.feasibility import planning_load
from megatron_epp.planner.lower_bound import least_seconds_per
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit_block import PlannedBlock
from megatron_epp.planner.registry import PACKED, PLANNERS, STOCK
from megatron_epp.planner.result import PlannedReplica
from megatron_epp.planner.runner import Runner, in_turn
from megatron_epp.planner.stock import Stock, stock_of
from megatron_epp.planner.tuning.layouts import Layout
from megatron_epp.sim.exchange import exchange
from megatron_epp.sim.play import play

ELASTIC = "epp"
FINALISTS = 4
# Bound of the ratio of a first plan's time to its sketch's time; the largest observed ratio is
# 1.09.
GLANCE = 1.1
# Largest observed relative difference of a sketch from the plan with the full effort.
MARGIN = 0.02
# Offloading is tried only if recompute takes more than this fraction of the time, and first plans
# with vocabulary parallelism only if it takes less.
TIGHT = 0.005
OFFLOAD_PAYS = 0.01  # fraction of the time that offloading must save
# A choice is tight if it leaves less than this fraction of the budget. Predicted peaks of 45 public
# runs are 1.8% off in the median, and up to 32% too low.
TIGHT_MEMORY = 0.15
HEADROOM_COSTS = 0.05  # most additional time that a default with that room may take
# Number of layouts planned together, before results exclude further layouts. A constant, so that
# the result does not depend on the number of worker processes.
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run the job, with its predicted performance as means over the planned batches.

    Attributes:
        layout: parallel degrees of the job.
        layers: number of layers of every stage.
        planner: name of the planner, or STOCK.
        offload: whether layers may be offloaded.
        seconds: time of an iteration including the exchange between replicas. If only the first
            batch was planned, the time is scaled to all batches.
        tokens_per_second: throughput of the whole job.
        bubble_ratio: fraction of the ranks' time, without the exchange between replicas, in which
            they are idle.
        recompute_ratio: fraction of the same time for recompute.
        comm_ratio: fraction of the same time for exposed communication inside stages.
        exchange_seconds: exposed part of the exchange between replicas.
        hidden_seconds: part of the exchange that overlaps with computation.
        peak_bytes: memory peak of the fullest device, including model states.
        batches: number of batches planned.
        ep: number of devices over which a layer's experts are sharded; 1 if experts are not
            sharded.
        vocabulary_parallel: whether the LM head uses vocabulary parallelism.
        place: rank of every stage; () if stage i is on rank i.
        packing_tokens: length to which documents are packed in every planned batch; () if there is
            no such length.
        multiple: chunks are padded to a multiple of this number of tokens.
        planning_load: CPU seconds of planning, divided by the CPU seconds that the hosts' planning
            cores provide in an iteration (feasibility.planning_load); 0 if not measured. It is
            measured on the machine that runs the search, and no decision depends on it.
        plan: plan with the highest memory peak, over all planned batches.
        cost: cost model of ``plan``.
        stock: Megatron's own schedule and its static job, if ``planner`` is STOCK.
    """

    layout: Layout
    layers: tuple[int, ...]
    planner: str
    offload: bool
    seconds: float
    tokens_per_second: float
    bubble_ratio: float
    recompute_ratio: float
    comm_ratio: float
    exchange_seconds: float
    hidden_seconds: float
    peak_bytes: int
    batches: int
    ep: int = 1
    vocabulary_parallel: bool = False
    place: tuple[int, ...] = ()
    packing_tokens: tuple[int, ...] = ()
    multiple: int = 1
    planning_load: float = dataclasses.field(default=0.0, repr=False, compare=False)
    plan: Plan | None = dataclasses.field(default=None, repr=False, compare=False)
    cost: Cost | None = dataclasses.field(default=None, repr=False, compare=False)
    stock: Stock | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def budget_bytes(self) -> float:
        """Memory budget of the smallest device in bytes; 0 if nothing was planned."""
        return min(self.cost.device_budget_bytes) if self.cost is not None else 0.0

    @property
    def tight(self) -> bool:
        """Whether the fullest device has less than ``TIGHT_MEMORY`` of its budget left."""
        return self.peak_bytes > (1 - TIGHT_MEMORY) * self.budget_bytes > 0

    @property
    def late(self) -> bool:
        """Whether training would wait for its plans, because planning takes too long."""
        return self.planning_load > 1

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of an iteration's time by category; they add up to 1."""
        planned = 1 - self.exchange_seconds / self.seconds
        used = 1 - self.bubble_ratio - self.recompute_ratio - self.comm_ratio
        return {
            "computing": used * planned,
            "recomputing": self.recompute_ratio * planned,
            "communicating inside stages": self.comm_ratio * planned,
            "bubbles": self.bubble_ratio * planned,
            "exchange between replicas": self.exchange_seconds / self.seconds,
        }

    def facts(self) -> dict:
        """Return the fields as a dict for JSON."""
        hidden = {"plan", "cost", "planning_load", "stock"}
        rare = ("ep", "vocabulary_parallel", "place", "packing_tokens")
        hidden |= {
            f.name for f in fields(self) if f.name in rare and getattr(self, f.name) == f.default
        }
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in hidden}
        return {
            **{name: getattr(self.layout, name) for name in ("tp", "cp", "pp", "dp")},
            **own,
            "layout": str(self.layout),
            "layers": list(self.layers),
            "shares": self.shares,
            "tight": self.tight,
            **({"late": self.late} if self.late else {}),
            **({"stock": self.stock.facts()} if self.stock else {}),
        }


@dataclass(frozen=True, slots=True)
class Survey:
    """Result of :func:`survey`.

    Attributes:
        choices: predicted choices, sorted by descending number of planned batches, and then by
            ascending time.
        refused: layouts that cannot run, with the reason.
        bounded: layouts excluded by their lower bound.
        stopped: whether the search was interrupted; the other fields then contain the results so
            far.
    """

    choices: tuple[Choice, ...]
    refused: dict[Layout, str]
    bounded: tuple[Layout, ...]
    stopped: bool = False

    @property
    def default(self) -> int:
        """Index of the default choice.

        This is the first choice whose memory is not tight (:attr:`Choice.tight`), if its time
        exceeds that of the first choice by at most the fraction ``HEADROOM_COSTS``; else the first
        choice.
        """
        most = self.choices[0].seconds * (1 + HEADROOM_COSTS)
        roomy = (at for at, each in enumerate(self.choices) if not each.tight)
        return next((at for at in roomy if self.choices[at].seconds <= most), 0)


def survey(
    layouts: Sequence[Layout],
    batches: Sequence[Sequence[int]],
    cost_for: Callable[[Layout], Cost],
    options: Options,
    *,
    top: int = 10,
    placement: bool = True,
    vocabulary: str = "off",
    words: int = 0,
    progress: Callable[[Iterable, int, str], Iterable] = lambda items, total, what: items,
    run: Runner = in_turn,
) -> Survey:
    """Return the best choices among the layouts, and the reasons why layouts were left out.

    An interrupt (Ctrl-C) ends the search. The function then returns the results so far.

    Args:
        layouts: layouts to try.
        batches: document lengths of every global batch in tokens; the first batch decides between
            layouts.
        cost_for: function that returns the cost model of a layout with its layers divided
            evenly over the stages. It raises a ValueError if the layout cannot run.
        options: planner options, such as levers and effort.
        top: number of choices wanted; layouts that cannot be among them are left out.
        placement: whether to also try numbers of layers per stage that balance the stages' time,
            and several stages per rank for the best layouts.
        vocabulary: vocabulary parallelism of the ``epp`` planner: off, on, or auto (if faster).
        words: size of the vocabulary; 0 if unknown.
        progress: function that is called with some items, their number and a title. It returns an
            iterator over the items that shows a progress bar.
        run: function that maps a function over tasks, for example in worker processes.
    """
    costs: dict[Layout, Cost] = {}
    refused: dict[Layout, str] = {}
    bounds: dict[Layout, float] = {}
    for layout in progress(layouts, len(layouts), "bounds"):
        try:
            costs[layout] = cost_for(layout)
            bounds[layout] = _bound(batches[0], costs[layout], options)
        except ValueError as error:
            refused[layout] = str(error).split("\n")[0]
    likely = {layout: _estimate(bound, costs[layout]) for layout, bound in bounds.items()}
    ordered = sorted(likely, key=lambda layout: (likely[layout], layout))
    kept = options.levers - {"offload"}  # _with_full_effort tries offloading
    glance = dataclasses.replace(options, effort=0, levers=kept)
    effort = SKETCH_EFFORT if options.effort is None else min(SKETCH_EFFORT, options.effort)
    sketch = dataclasses.replace(options, effort=effort, levers=kept)

    glances: dict[Layout, list[Choice]] = {}
    bounded: list[Layout] = []
    choices: list[Choice] = []
    least = np.inf

    def looks(group: Sequence[Layout], how: Options, planners: Sequence[str]) -> Iterator:
        asked = batches[0], how, planners, placement, vocabulary
        tasks = [
            (layout, costs[layout], *asked, _elastic(glances.get(layout, ()))) for layout in group
        ]
        for layout, (choices_of, why) in zip(group, run(_look_at, tasks), strict=True):
            if why:
                refused.setdefault(layout, why)
            yield layout, choices_of

    def how_of(cost: Cost) -> dict[str, Any]:
        """Return the arguments of run_choice for a layout."""
        return {
            "placements": PLACEMENT_NAMES if placement and cost.layout.stages > 1 else (),
            "vocabularies": _cuts(cost, ELASTIC, vocabulary),
            "words": padded_words(words, cost.layout.tp),
        }

    try:
        groups = [*batched(ordered, AT_ONCE)]
        for group in progress(groups, len(groups), "first plans"):
            best = sorted(choice.seconds for glanced in glances.values() for choice in glanced)
            out = {each for each in group if len(best) >= top and bounds[each] > best[top - 1]}
            bounded += [each for each in group if each in out]
            kept_in = [each for each in group if each not in out]
            glances.update(looks(kept_in, glance, (ELASTIC, STOCK)))
        near = {
            layout: _elastic_seconds(glanced, likely[layout]) for layout, glanced in glances.items()
        }
        groups = [*batched(sorted(near, key=near.__getitem__), AT_ONCE)]
        for number, group in enumerate(progress(groups, len(groups), "plans")):
            wanted = [
                layout
                for at, layout in enumerate(group, number * AT_ONCE)
                if (at < top or near[layout] <= least * GLANCE)
                # Where memory is tight, a first plan took as much effort as a sketch, or more.
                and not ((first := _elastic(glances[layout])) and first.recompute_ratio > 0)
            ]
            for layout, sketched in looks(wanted, sketch, (ELASTIC,)):
                glances[layout] = [*glances[layout], *sketched]
            least = min(least, *(_elastic_seconds(glances[each], np.inf) for each in group))
        for layout, glanced in glances.items():
            if glanced:
                refused.pop(layout, None)
            choices += _best_of(glanced)
        choices = _finals(choices, batches, costs, options, how_of, progress, run)
    except KeyboardInterrupt:
        known = choices or [each for glanced in glances.values() for each in _best_of(glanced)]
        return Survey(tuple(sorted(known, key=_order)), refused, tuple(bounded), True)
    return Survey(tuple(sorted(choices, key=_order)), refused, tuple(bounded))


def _look_at(
    layout: Layout,
    cost: Cost,
    lengths: Sequence[int],
    options: Options,
    planners: Sequence[str],
    by_time: bool,
    vocabulary: str,
    glanced: Choice | None,
) -> tuple[list[Choice], str]:
    """Return one layout's choices for one batch, and the first reason why a plan cannot run.

    The layers and the vocabulary parallelism are those of ``glanced``, if that is not None.
    """
    choices: list[Choice] = []
    why = ""
    for planner in planners:
        cuts = (glanced.vocabulary_parallel,) if glanced else _cuts(cost, planner, vocabulary)
        for cut in cuts:
            if cut and len(cuts) > 1 and choices and choices[-1].recompute_ratio > TIGHT:
                continue  # slower in all layouts measured; finalists try both
            open_layers = by_time and planner == ELASTIC  # stock chooses its layers itself
            if glanced:
                ways = [glanced.layers]
            else:
                ways = partitions(cost.with_vocabulary(cut), lengths, open_layers)
            for layers in reversed(ways):  # balanced by time first; even layers if those do not fit
                try:
                    chosen = layout, cost, layers, [lengths], options, planner
                    choices.append(choice_of(*chosen, cut=cut))
                    break
                except ValueError as error:
                    why = why or str(error).split("\n")[0]
    return choices, why


def _elastic(choices: Iterable[Choice]) -> Choice | None:
    """Return the fastest ``epp`` choice, or None if there is none."""
    elastic = (choice for choice in choices if choice.planner == ELASTIC)
    return min(elastic, key=lambda choice: choice.seconds, default=None)


def _elastic_seconds(choices: Iterable[Choice], otherwise: float) -> float:
    """Return the time of the fastest ``epp`` choice, or ``otherwise`` if there is none."""
    fastest = _elastic(choices)
    return fastest.seconds if fastest else otherwise


def _order(choice: Choice) -> tuple:
    """Return a choice's sort key: choices with more planned batches first, then the fastest."""
    return -choice.batches, choice.seconds, choice.layout, choice.planner


def _finals(
    choices: list[Choice],
    batches: Sequence[Sequence[int]],
    costs: dict[Layout, Cost],
    options: Options,
    how_of: Callable[[Cost], Mapping[str, Any]],
    progress: Callable[[Iterable, int, str], Iterable],
    run: Runner,
) -> list[Choice]:
    """Return ``choices``, in which the most promising ones are planned with the full effort."""
    elastic = sorted((c for c in choices if c.planner == ELASTIC), key=_order)
    stock = sorted((c for c in choices if c.planner != ELASTIC), key=_order)
    least = min((c.seconds for c in elastic), default=0.0)
    near = [c for c in elastic if c.seconds <= least * (1 + 2 * MARGIN)]
    finalists = near[: 2 * FINALISTS] if len(near) > FINALISTS else elastic[:FINALISTS]
    # The default may be a choice that is not tight, so the fastest such choice is a finalist, too.
    most = min((c.seconds for c in choices), default=0.0) * (1 + HEADROOM_COSTS + 2 * MARGIN)

    def roomy(ordered: list[Choice]) -> list[Choice]:
        return [c for c in ordered if not c.tight and c.seconds <= most][:1]

    asked = dict.fromkeys((*finalists, *roomy(elastic)))
    tasks = [(c, cost := costs[c.layout], batches[0], options, how_of(cost)) for c in asked]
    placed = sorted(progress(run(_with_stages, tasks), len(tasks), "stages"), key=_order)
    kept = {c.layout for c in roomy(elastic)}
    work = [c for at, c in enumerate(placed) if at < FINALISTS or c.layout in kept]
    work += dict.fromkeys((*stock[:FINALISTS], *roomy(stock)))
    finals = [(choice, costs[choice.layout], batches, options) for choice in work]
    evaluated = [
        each
        for several in progress(run(_with_full_effort, finals), len(finals), "finals")
        for each in several
    ]
    planned = {(c.layout, c.planner) for c in work}
    others = (c for c in choices if (c.layout, c.planner) not in planned)
    return [*_best_of(evaluated), *(_on_all(c, batches, costs[c.layout], options) for c in others)]


def _with_stages(
    choice: Choice, cost: Cost, lengths: Sequence[int], options: Options, how: Mapping[str, Any]
) -> Choice:
    """Return ``choice`` with the stages of :func:`~.choice.run_choice`, and their time.

    ``lengths`` are those of the first batch, and ``how`` the arguments of run_choice.
    """
    together = dataclasses.replace(options, lockstep=cost.layout.lockstep)
    chosen = run_choice(cost, [lengths], together, ELASTIC, **how)
    stages, seconds = chosen.cost.layout, chosen.seconds[chosen.way]
    return dataclasses.replace(
        choice,
        layers=stages.layers,
        place=stages.place,
        vocabulary_parallel=stages.vocabulary_parallel,
        seconds=choice.seconds if seconds is None else seconds + choice.exchange_seconds,
    )


def _with_full_effort(
    choice: Choice, cost: Cost, batches: Sequence[Sequence[int]], options: Options
) -> list[Choice]:
    """Return ``choice``, planned on all batches, without and perhaps with offloading.

    Offloading is tried if recompute takes more than the fraction ``TIGHT`` of the time.
    """
    offloads = [False]
    tight = choice.recompute_ratio > TIGHT and cost.layout.profile.host_bytes_per_second > 0
    if tight and choice.planner == ELASTIC and "offload" in options.levers:
        offloads.append(True)
    evaluated = []
    for offload in offloads:
        with suppress(ValueError):  # a later batch does not fit, which rules the variant out
            variant = dataclasses.replace(choice, offload=offload)
            evaluated.append(replanned(variant, cost, batches, options))
    return evaluated


def _on_all(
    choice: Choice, batches: Sequence[Sequence[int]], cost: Cost, options: Options
) -> Choice:
    """Return ``choice`` with the times of its first batch scaled to the mean of all batches.

    The factor is the ratio of the batches' lower bounds.
    """
    bounds = [_bound(lengths, cost, options) for lengths in batches]
    factor = float(np.mean(bounds)) / bounds[0]
    seconds = choice.seconds * factor
    return dataclasses.replace(
        choice,
        seconds=seconds,
        exchange_seconds=choice.exchange_seconds * factor,
        hidden_seconds=choice.hidden_seconds * factor,
        tokens_per_second=sum(map(sum, batches)) / len(batches) / seconds,
    )


def _best_of(choices: Sequence[Choice]) -> list[Choice]:
    """Return the best choice of every layout and planner.

    A choice with offloading is the best only if it saves OFFLOAD_PAYS of the time of the best
    choice without.
    """
    best: dict[tuple, Choice] = {}
    for choice in sorted(choices, key=lambda c: c.offload):
        key = choice.layout, choice.planner
        other = best.get(key)
        saves = OFFLOAD_PAYS * (other is not None and choice.offload > other.offload)
        if other is None or choice.seconds < other.seconds * (1 - saves):
            best[key] = choice
    return list(best.values())


def _cuts(cost: Cost, planner: str, vocabulary: str) -> tuple[bool, ...]:
    """Return the values of vocabulary parallelism (off: False, on: True) to try."""
    one_stage, lockstep = cost.layout.stages == 1, cost.layout.lockstep > 1
    if one_stage or lockstep or planner != ELASTIC or vocabulary == "off":
        return (False,)
    if vocabulary == "on":
        return (True,)
    return (False, True) if ruled_out(cost) is None else (False,)


def _bound(lengths: Sequence[int], cost: Cost, options: Options) -> float:
    """Return a lower bound on the time of any plan, for any layer partition.

    The bound is the maximum of three times. The first two are means over stages: of the time for
    1 / dp of the batch, and of the time for the longest document. The third is the time of the
    fastest layer, multiplied by layers / stages (rounded up), which some stage must have. If
    documents may run on one context-parallel rank, all-to-all is not counted.
    """
    local = can_be_local(cost, options)
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
    forward, back, *halves = (least_seconds_per(cost, kind, local) for kind in kinds)
    per = (forward + back).mean(axis=0)
    per = np.minimum(per, (forward + halves[0] + halves[1]).mean(axis=0))
    batch_features = cost.layout.columns.batch_features(np.array(lengths), cost.layout.dp)
    longest = cost.layout.columns.batch_features(np.array([max(lengths)]), 1.0)
    mean = float(max(per @ batch_features / cost.layout.dp, per @ longest))
    most = -(-sum(cost.layout.layers) // cost.layout.stages)
    single = layer_costs(cost)
    forward, back, *halves = (least_seconds_per(single, kind, local) for kind in kinds)
    layer = np.minimum(forward + halves[0] + halves[1], forward + back)
    inside = layer[1:-1]
    if len(layer) <= 2:  # only the embedding and the LM head
        return mean
    cheapest = max((inside @ batch_features).min() / cost.layout.dp, (inside @ longest).min())
    return max(mean, most * float(cheapest))


def _estimate(bound: float, cost: Cost) -> float:
    """Return the approximate time of a plan, by which the search orders the layouts.

    The estimate is the bound, plus warm-up and cool-down of the pipeline, plus the constant time of
    every chunk. It assumes the number of chunks that minimises this sum.
    """
    per_chunk = float(
        (cost.seconds.per(Kind.FORWARD) + cost.seconds.per(Kind.BACKWARD))[:, CHUNKS].mean()
    )
    return bound + 2 * float(np.sqrt((cost.layout.stages - 1) * bound * per_chunk))


def partitions(cost: Cost, lengths: Sequence[int], by_time: bool) -> list[tuple[int, ...]]:
    """Return the layers per stage to try: as in ``cost``, and balanced by time if that differs."""
    if not by_time or cost.layout.stages == 1:
        return [cost.layout.layers]
    fastest = fastest_layers(cost, expected_features(cost, [heaviest(lengths, cost)]))
    moved = None if fastest is None or fastest == cost.layout.layers else with_layers(cost, fastest)
    return [cost.layout.layers] if moved is None else [cost.layout.layers, moved.layout.layers]


def choice_of(
    layout: Layout,
    even: Cost,
    layers: tuple[int, ...],
    batches: Sequence[Sequence[int]],
    options: Options,
    planner: str,
    *,
    cut: bool = False,
    place: tuple[int, ...] = (),
) -> Choice:
    """Plan all batches for one layout, and return the means of the predictions.

    Stock chooses its placement and layers itself.

    Args:
        layout: parallel degrees.
        even: cost model of the layout with layers divided evenly over the stages.
        layers: number of layers of every stage.
        batches: document lengths of every global batch in tokens.
        options: planner options, such as levers and effort.
        planner: name of the planner, or STOCK.
        cut: whether to use vocabulary parallelism.
        place: rank of every stage if ranks have several stages, else ().

    Raises:
        ValueError: if the model states or a batch do not fit.
    """
    stock, plans_by, contexts = None, planner, [options.context] * len(batches)
    if planner == STOCK:
        lockstep = even.layout.lockstep
        held = [heaviest(lengths, even, lockstep) for lengths in batches]
        stock = stock_of(held, even, dataclasses.replace(options, lockstep=lockstep))
        cost, plans_by, contexts = stock.cost, PACKED, [each.tokens for each in stock.batches]
        layers, place = cost.layout.layers, cost.layout.place
    else:
        if place:
            even = with_placement(even, Placement(place, layers))
        cost = even.replace(layers=layers, vocabulary_parallel=cut)
    cost.require_states_fit()
    results, taken = [], []
    for lengths, context in zip(batches, contexts, strict=True):
        began = time.process_time()
        here = dataclasses.replace(options, context=context)
        results.append(heaviest_plan(lengths, cost, here, plans_by))
        taken.append(time.process_time() - began)
    exposed = [each for _, each, _ in results]
    seconds = [planned.seconds + each for planned, each, _ in results]
    tokens = sum(sum(lengths) for lengths in batches)
    fullest = max((planned for planned, _, _ in results), key=lambda each: max(each.peak_bytes))

    def mean(values: Iterable[float]) -> float:
        """Return the mean of one value per batch, weighted by the times of the batches."""
        return float(np.average(list(values), weights=seconds))

    return Choice(
        layout=layout,
        layers=layers,
        planner=planner,
        offload="offload" in options.levers,
        seconds=float(np.mean(seconds)),
        tokens_per_second=tokens / sum(seconds),
        bubble_ratio=mean(planned.bubble_ratio for planned, _, _ in results),
        recompute_ratio=mean(planned.recompute_ratio for planned, _, _ in results),
        comm_ratio=mean(planned.comm_ratio for planned, _, _ in results),
        exchange_seconds=float(np.mean(exposed)),
        hidden_seconds=float(np.mean([hidden for _, _, hidden in results])),
        peak_bytes=max(max(planned.peak_bytes) for planned, _, _ in results),
        batches=len(batches),
        ep=cost.layout.ep,
        vocabulary_parallel=cut,
        place=place,
        packing_tokens=tuple(p.packing_tokens for p, _, _ in results if p.packing_tokens),
        multiple=cost.multiple,
        # The minimum, because the first plans of a process may include compilation. With effort 0,
        # the planning time is not representative.
        planning_load=planning_load(cost, min(taken), float(np.mean(seconds)))
        if planner == ELASTIC and options.effort != 0
        else 0.0,
        plan=fullest.plan,
        cost=cost,
        stock=stock,
    )


def replanned(
    choice: Choice, even: Cost, batches: Sequence[Sequence[int]], options: Options
) -> Choice:
    """Plan other batches or options with the layout, layers and planner of ``choice``.

    Whether layers are offloaded is that of ``choice``, not of ``options``. ``even`` is the cost
    model as in :func:`choice_of`.

    Raises:
        ValueError: if the model states or a batch do not fit.
    """
    how = _options_of(choice, options)
    job = choice.layout, even, choice.layers, batches, how, choice.planner
    return choice_of(*job, cut=choice.vocabulary_parallel, place=choice.place)


def _options_of(choice: Choice, options: Options) -> Options:
    """Return ``options`` with the lever offload as ``choice`` has it."""
    levers = options.levers | {"offload"} if choice.offload else options.levers - {"offload"}
    return dataclasses.replace(options, levers=levers)


def slow_hosts(choice: Choice, lengths: Sequence[int], options: Options) -> str | None:
    """Return :func:`~.choose.slow_hosts.slow_host_line` for the plan of ``choice`` for a batch."""
    if choice.cost is None or not assumes_host_time(choice.cost):
        return None
    how = dataclasses.replace(_options_of(choice, options), lockstep=choice.cost.layout.lockstep)
    planned = _heaviest_block(lengths, choice.cost, how, choice.planner).planned
    return slow_host_line(planned, choice.cost, how, choice.planner)


def _heaviest_block(
    lengths: Sequence[int], cost: Cost, options: Options, planner: str
) -> PlannedBlock:
    """Plan the lockstep group (``options.lockstep`` replicas) with the most work."""
    held = heaviest(lengths, cost, options.lockstep)
    return PLANNERS[planner].plan_block(held, cost, options)


def heaviest_plan(
    lengths: Sequence[int], cost: Cost, options: Options, planner: str
) -> tuple[PlannedReplica, float, float]:
    """Return the plan of the replica with the most work, and times of data-parallel communication.

    Args:
        lengths: document lengths of the global batch in tokens.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, such as levers and effort; ``lockstep`` is that of ``cost``.
        planner: name of the planner.

    Returns:
        The planned replica (with replicas in lockstep, the one with the highest memory peak); then
        the exposed and the overlapped seconds of gradient reduction and parameter gathers.

    Raises:
        ValueError: if no plan fits the memory budget.
    """
    together = dataclasses.replace(options, lockstep=cost.layout.lockstep)
    block = _heaviest_block(lengths, cost, together, planner)
    planned = max(block.planned, key=lambda one: (not one.fits, max(one.peak_bytes)))
    if not planned.fits:
        raise ValueError(f"{planner} finds no plan that fits the memory budget")
    if cost.layout.network is None or cost.layout.cp * cost.layout.dp == 1:
        return planned, 0.0, 0.0
    comm = exchange(cost, play(planned.plan, cost.table(planned.plan)))
    return planned, comm.exposed_seconds, max(comm.seconds - comm.exposed_seconds, 0.0)
