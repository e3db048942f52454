"""Choice of placement, layers per stage and vocabulary parallelism, from plans of some batches.

Weights do not move between iterations, so the choice holds for a whole run. :func:`run_choice`
plans the first batch with the candidates, and all batches with the fastest of them. The result
depends only on the function's arguments.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.corpus.shared_prefixes import Batch, PrefixForest, computed_spans, lengths_of
from megatron_epp.cost.analytic import is_of_cpu
from megatron_epp.cost.build import even_layers
from megatron_epp.cost.cost import Cost
from megatron_epp.ir.placement import EVENLY, Placement, named_placement
from megatron_epp.planner.choose.partition import (
    expected_features,
    fastest_layers,
    with_layers,
)
from megatron_epp.planner.choose.slow_hosts import SLOW_HOST, assumes_host_time, with_hosts
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.planner.replicas import balance_blocks, divide_documents
from megatron_epp.planner.runner import Runner, in_turn
from megatron_epp.planner.tree_division import node_seconds

PLACEMENT_NAMES = ("v", "interleaved 2", "interleaved 3", "interleaved 4")
SKETCH_EFFORT = 1  # effort of the plans that decide between finalists
FINALISTS = 2  # number of placements whose best candidates may be planned for all batches
# Fractions of the time that a candidate must save: cost models are not exact enough for less.
PARTITION_PAYS, PLACEMENT_PAYS, VOCABULARY_PAYS = 0.005, 0.01, 0.01


@dataclass(frozen=True, slots=True)
class Way:
    """A candidate: how the model is divided over the pipeline ranks.

    Attributes:
        placement: name of the placement (ir.placement).
        layers: number of layers of every stage.
        vocabulary: whether the LM head is sharded over all stages.
    """

    placement: str
    layers: tuple[int, ...]
    vocabulary: bool = False

    def __str__(self) -> str:
        return self.unlike(None)

    def unlike(self, other: "Way | None") -> str:
        """Describe the fields that differ from ``other``, or all fields if ``other`` is None."""
        parts = []
        if other is None or self.placement != other.placement:
            parts.append("one stage a rank" if self.placement == EVENLY else self.placement)
        if other is None or self.layers != other.layers:
            parts.append(f"layers {' '.join(map(str, self.layers))}")
        if self.vocabulary != (other is not None and other.vocabulary):
            parts.append(
                "vocabulary parallelism" if self.vocabulary else "its LM head on the last stage"
            )
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class RunChoice:
    """The chosen candidate, and the times of the candidates that were planned for all batches.

    Attributes:
        cost: cost model with the chosen candidate.
        way: the chosen candidate.
        seconds: for each planned candidate, total seconds of the plans of all batches; None if a
            batch does not fit, or if there is only one candidate. The first candidate is the
            default of the run.
        slow_gain: fraction of the default's time that the choice saves on hosts that are SLOW_HOST
            times as slow as assumed; infinite if the default does not fit; None if the host time is
            measured.
    """

    cost: Cost
    way: Way
    seconds: dict[Way, float | None]
    slow_gain: float | None = None

    @property
    def gain(self) -> float:
        """Fraction of the default's time that the choice saves; 0 if one of them does not fit."""
        return self.gain_of(self.way)

    def gain_of(self, way: Way) -> float:
        """Return the fraction of the default's time that ``way`` saves (negative: it adds)."""
        (first, *_), taken = self.seconds.values(), self.seconds.get(way)
        return 1 - taken / first if first and taken else 0.0

    @property
    def comparison(self) -> str:
        """Text that compares every planned candidate with the default."""
        (first, first_seconds), *others = self.seconds.items()
        parts = []
        for way, seconds in others:
            gain = self.gain_of(way)
            if seconds is None:
                result = "fits no plan"
            elif first_seconds is None:
                result = "fits, the first does not"
            else:
                result = f"takes {abs(gain):.1%} {'less' if gain >= 0 else 'more'} time"
            parts.append(f"{way.unlike(first)} {result}")
        if self.slow_gain is not None and math.isfinite(self.slow_gain) and self.way != first:
            parts.append(
                f"on hosts {SLOW_HOST:g} times as slow, the choice saves {self.slow_gain:.1%}"
            )
        return f"compared with {first}: {'; '.join(parts)}" if parts else "no other can run"


def sketched_seconds(
    cost: Cost,
    batches: Sequence[Batch],
    options: Options,
    planner: str,
    effort: int = SKETCH_EFFORT,
) -> float | None:
    """Return the total seconds of low-effort plans for all batches; None if a batch does not fit.

    Args:
        cost: cost model, including the stages and parallel degrees.
        batches: documents of one replica (or lockstep group) in each batch: lengths in tokens, or
            documents with shared prefixes.
        options: planner options, such as levers and effort.
        planner: name of the planner.
        effort: maximum effort of the planner's search.
    """
    sketch = dataclasses.replace(
        options,
        effort=effort if options.effort is None else min(options.effort, effort),
    )
    total, row = 0.0, PLANNERS[planner]
    for batch in batches:
        try:
            if isinstance(batch, PrefixForest):
                planned = row.plan_forest(batch, cost, sketch).planned
            else:
                planned = row.plan_block(batch, cost, sketch).planned
        except ValueError:
            return None
        if not all(each.fits for each in planned):
            return None
        total += max(each.seconds for each in planned)
    return total


def heaviest(lengths: Sequence[int], cost: Cost, lockstep: int = 1) -> list[int]:
    """Return the lengths of the documents of the replica (or lockstep group) with the most work."""
    if cost.layout.dp == lockstep:
        return list(lengths)
    rates = rates_of(cost)
    assignments = balance_blocks(lengths, cost, cost.layout.dp // lockstep, lockstep)
    of_replicas = [[lengths[document] for document in assignment] for assignment in assignments]
    return max(of_replicas, key=lambda held: float(rates.document_seconds(np.array(held)).sum()))


def heaviest_part(batch: Batch, cost: Cost, options: Options, planner: str) -> Batch:
    """Return the part of ``batch`` of the replica (or lockstep group) with the most work.

    The part is a forest if ``batch`` is a forest and ``planner`` computes shared prefixes once.
    Otherwise, it contains lengths.
    """
    replicas, lengths = cost.layout.dp, lengths_of(batch)
    computes_once = PLANNERS[planner].takes_prefixes and replicas <= len(lengths)
    if not (computes_once and isinstance(batch, PrefixForest)):
        return heaviest(lengths, cost, options.lockstep)
    rates = rates_of(cost)
    parts = map(batch.of, divide_documents(batch, cost, options, replicas, planner))
    return max(parts, key=lambda part: sum(node_seconds(part, rates)))


def run_choice(
    cost: Cost,
    batches: Sequence[Batch],
    options: Options,
    planner: str,
    *,
    placements: Sequence[str] = (),
    vocabularies: Sequence[bool] = (False,),
    words: int = 0,
    run: Runner = in_turn,
) -> RunChoice:
    """Return the fastest candidate that pays for ``batches``, or the default if none pays.

    A candidate pays if it saves at least a certain fraction (PARTITION_PAYS, PLACEMENT_PAYS or
    VOCABULARY_PAYS) of the time of the candidate chosen before it, which is the default at first.

    Only the replica (or lockstep group) with the most work in each batch is planned. Candidates are
    first planned for the first batch with little effort. The default and the fastest candidates
    with its placement are then planned for all batches. At most FINALISTS candidates with other
    placements follow, the fastest first, until one of them pays. If the host time is assumed,
    candidates that differ in more than layers per stage must also pay on hosts that are slower
    (:mod:`.slow_hosts`).

    Args:
        cost: cost model of the default stages and layers, one stage per rank unless ``placements``
            is empty.
        batches: document lengths of each global batch of the job in tokens, or documents with
            shared prefixes. The planner computes a shared prefix once if it supports this.
        options: planner options, such as levers and effort.
        planner: name of the planner.
        placements: names of the placements to try besides that of ``cost``. The layers are divided
            evenly (for the placement of ``cost``: as in ``cost``), or such that they balance the
            ranks' time. If empty, the stages and layers of ``cost`` do not change.
        vocabularies: whether to try the LM head on the last stage (False), sharded over all stages
            (True), or both.
        words: padded size of the vocabulary, which a sharded LM head divides over all stages and
            tensor-parallel ranks; 0 if unknown.
        run: function that maps a function over tasks, for example in worker processes.
    """
    held = [heaviest_part(batch, cost, options, planner) for batch in batches]
    candidates = _candidates(cost, held, planner, placements, vocabularies, words)
    return _Chooser(held, options, planner, assumes_host_time(cost), run).choice(dict(candidates))


def _candidates(
    cost: Cost,
    batches: Sequence[Batch],
    planner: str,
    placements: Sequence[str],
    vocabularies: Sequence[bool],
    words: int,
) -> Iterator[tuple[Way, Cost]]:
    """Yield the default, then the candidates that can run, each with its cost model."""
    even = cost.layout.placement.is_even
    default = EVENLY if even else f"place {cost.layout.placement}"
    for name in dict.fromkeys((default, *placements)):
        placed = cost if name == default else placed_cost(cost, name)
        if placed is None:
            continue
        takes = PLANNERS[planner].takes(placed.layout.placement.place)
        shards = placed.layout.stages * placed.layout.tp
        for vocabulary in vocabularies:
            runs = takes and not (vocabulary and words % shards)
            if not runs and (name, vocabulary) != (default, vocabularies[0]):
                continue
            here = placed.with_vocabulary(vocabulary)
            yield Way(name, here.layout.layers, vocabulary), here
            if placements and here.layout.stages > 1:
                features = expected_features(here, batches)
                layers = fastest_layers(here, features) or here.layout.layers
                yield Way(name, layers, vocabulary), here.replace(layers=layers)


class _Chooser:
    """Plans of candidates, which are made once."""

    def __init__(
        self,
        held: list[Batch],
        options: Options,
        planner: str,
        assumes_host: bool,
        run: Runner,
    ):
        self.held, self.options, self.planner = held, options, planner
        self.assumes_host, self.run = assumes_host, run
        self.costs: dict[Way, Cost] = {}
        self.seconds: dict[Way, float | None] = {}
        self.slow: dict[Way, float | None] = {}  # on slow hosts

    def choice(self, costs: dict[Way, Cost]) -> RunChoice:
        """Return the choice among ``costs``, whose first is the default."""
        self.costs = costs
        default, *others = costs
        if not others:
            return RunChoice(costs[default], default, {default: None})
        glances = self._glances()
        simple = [way for way in glances if way.placement == default.placement]
        simple = [default, *_best_of_each(simple, glances, lambda way: way.vocabulary)]
        self._plan(simple)
        chosen = default
        # Without and with vocabulary parallelism, then with several stages per rank.
        for way in sorted(
            dict.fromkeys(simple), key=lambda way: (way.vocabulary, self._taken(way))
        ):
            if self._pays(way, chosen):
                chosen = way
        placed = [way for way, seconds in glances.items() if math.isfinite(seconds)]
        placed = [way for way in placed if way.placement != default.placement]
        fastest = sorted(placed, key=glances.__getitem__)[:FINALISTS]
        chosen = next((way for way in fastest if self._pays(way, chosen)), chosen)
        slow = None
        if self.assumes_host:
            slow = self._gain(chosen, default, SLOW_HOST) if chosen != default else 0.0
        return RunChoice(self.costs[chosen], chosen, dict(self.seconds), slow)

    def _glances(self) -> dict[Way, float]:
        """Return the seconds of plans of the first batch; infinite if a candidate is hopeless.

        With several stages per rank, the second value of vocabulary parallelism is tried only with
        the FINALISTS placements that are fastest with the first.
        """
        tokens, starts = computed_spans(self.held[0])
        local = "local" in self.options.levers
        bounds = {
            way: lower_bound_seconds(tokens, cost, local=local, starts=starts)
            / self.options.lockstep
            for way, cost in self.costs.items()
            if with_layers(cost, way.layers) is not None
        }
        glances = dict.fromkeys(self.costs, math.inf)
        default = next(iter(glances))
        first = [way for way in bounds if default.vocabulary == way.vocabulary]
        self._glance(first, bounds, glances)
        placed = [way for way in first if way.placement != default.placement]
        fastest = _best_of_each(placed, glances, lambda way: way.placement)[:FINALISTS]
        if not any(math.isfinite(glances[way]) for way in fastest):
            fastest = placed  # nothing fits without vocabulary parallelism
        names = {default.placement, *(way.placement for way in fastest)}
        second = [way for way in bounds if way not in first and way.placement in names]
        self._glance(second, bounds, glances)
        return glances

    def _glance(self, ways: list[Way], bounds: dict[Way, float], glances: dict[Way, float]) -> None:
        """Add the seconds of ``ways`` to ``glances``, but for those whose bound is too high."""
        ways = sorted(ways, key=bounds.__getitem__)
        for some in (ways[:1], ways[1:]):
            least = min(glances.values())
            tried = [way for way in some if bounds[way] < least]
            tasks = [
                (self.costs[way], self.held[:1], self.options, self.planner, 0) for way in tried
            ]
            for way, seconds in zip(tried, self.run(sketched_seconds, tasks), strict=True):
                glances[way] = seconds or math.inf

    def _plan(self, ways: Iterable[Way], host: float = 1.0) -> None:
        """Plan all batches of ``ways`` if hosts take ``host`` times as long as assumed."""
        known = self.seconds if host == 1 else self.slow
        new = [way for way in dict.fromkeys(ways) if way not in known]
        costs = [self.costs[way] if host == 1 else with_hosts(self.costs[way], host) for way in new]
        tasks = [
            (cost, [batch], self.options, self.planner) for cost in costs for batch in self.held
        ]
        seconds = self.run(sketched_seconds, tasks)
        for way in new:
            of_batches = list(itertools.islice(seconds, len(self.held)))
            known[way] = None if None in of_batches else sum(filter(None, of_batches))

    def _taken(self, way: Way, host: float = 1.0) -> float:
        """Return the seconds of all batches, which are planned; infinite if one does not fit."""
        taken = (self.seconds if host == 1 else self.slow)[way]
        return math.inf if taken is None else taken

    def _gain(self, way: Way, than: Way, host: float = 1.0) -> float:
        self._plan((than, way), host)
        before, after = self._taken(than, host), self._taken(way, host)
        if math.isinf(after):
            return -math.inf
        return math.inf if math.isinf(before) else 1 - after / before

    def _pays(self, way: Way, than: Way) -> bool:
        """Return whether ``way`` saves enough of the time of ``than``, on slow hosts as well."""
        if way == than:
            return False
        wanted = PARTITION_PAYS
        if way.vocabulary and not than.vocabulary:
            wanted = VOCABULARY_PAYS
        if way.placement != than.placement:
            wanted = PLACEMENT_PAYS
        if self._gain(way, than) < wanted:
            return False
        layers_only = (way.placement, way.vocabulary) == (than.placement, than.vocabulary)
        if layers_only or not self.assumes_host:
            return True
        return self._gain(way, than, SLOW_HOST) >= wanted


def _best_of_each(
    ways: Iterable[Way], seconds: dict[Way, float], key: Callable[[Way], Hashable]
) -> list[Way]:
    """Return the fastest of the ways with each value of ``key``, the fastest first."""
    best: dict[Hashable, Way] = {}
    for way in sorted(ways, key=seconds.__getitem__):
        best.setdefault(key(way), way)
    return list(best.values())


def placed_cost(cost: Cost, name: str) -> Cost | None:
    """Return ``cost`` with placement ``name``, layers divided evenly; None if they are too few."""
    placement = named_placement(name, cost.layout.placement.ranks)
    assert placement is not None
    if placement.stages > sum(cost.layout.layers) - cost.layout.pinned_layers + 1:
        return None
    return with_placement(cost, placement)


def placement_name(place: tuple[int, ...]) -> str:
    """Return the name in ``PLACEMENT_NAMES`` of the placement with stage s on rank ``place[s]``."""
    placements = {name: named_placement(name, max(place) + 1) for name in PLACEMENT_NAMES}
    return next(name for name, named in placements.items() if named and named.place == place)


def with_placement(cost: Cost, placement: Placement) -> Cost:
    """Return ``cost`` with the stages of ``placement`` in place of one stage per rank.

    Decoder layers are divided evenly over the stages, unless ``placement`` sets them per stage.

    Raises:
        ValueError: if there are more stages than layers.
    """
    mtp_layers = cost.layout.pinned_layers - 1
    *others, last = even_layers(sum(cost.layout.layers) - mtp_layers, placement.stages)
    return cost.replace(
        layers=placement.layers or (*others, last + mtp_layers),
        place=() if placement.is_even else placement.place,
    )


def ruled_out(cost: Cost) -> str | None:
    """Return why vocabulary parallelism cannot save time; None if only plans can decide."""
    if cost.layout.stages == 1:
        return "there is one stage"
    if cost.layout.lockstep > 1:
        return "experts are sharded over replicas"
    if is_of_cpu(cost.layout.profile):
        # scripts/bench/results/2026-11-22-cpu-vocab.md; 24% less time was predicted.
        return "on a CPU it took 1.16 of the time (measured)"
    return None


def padded_words(words: int, tp: int) -> int:
    """Return ``words``, the size of a vocabulary, as Megatron pads it by default."""
    multiple = 128 * tp
    return -(-words // multiple) * multiple
