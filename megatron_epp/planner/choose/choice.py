"""Choices made once per run, by planning its first batches with every candidate.

    partition_of     number of layers of every stage: balanced by time, or as the flags say
    placement_of     one or several stages per rank, with layers balanced by time
    vocabulary_of    LM head on the last stage, or sharded over all stages

Weights do not move between iterations, so a choice holds for a whole run. Each of the three
functions plans the batches with every candidate and chooses the fastest candidate
(:func:`fastest`). The result depends only on the function's arguments.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.analytic import is_of_cpu
from megatron_epp.cost.build import even_layers
from megatron_epp.cost.cost import Cost
from megatron_epp.ir.placement import EVENLY, Placement, named_placement
from megatron_epp.planner.choose.partition import (
    expected_features,
    fastest_layers,
    stage_layer_seconds,
    with_layers,
)
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.options import MANY_EFFORT, Options
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.planner.replicas import balance_blocks

SKETCH_EFFORT = 1  # effort of the plans that compare candidates
MOST_TRIED = 10  # number of partitions planned, over all rounds
# Fractions of the time that a candidate must save: cost models are not exact enough for less.
PARTITION_PAYS, PLACEMENT_PAYS, VOCABULARY_PAYS = 0.005, 0.02, 0.01
# If the plan without vocabulary parallelism exceeds its bound by this factor, or no plan was found,
# a search with little effort may have missed a better plan. The search is then repeated with more
# effort.
DOUBTFUL = 1.25
PLACEMENT_NAMES = ("interleaved 2", "v")  # tried besides one stage per rank
OFF, ON = "off", "on"


@dataclass(frozen=True, slots=True)
class RunChoice[K: Hashable]:
    """The fastest candidate (partition, placement or kind of LM head), and all candidates' times.

    Attributes:
        cost: cost model with the chosen candidate.
        key: name, or layers per stage, of the chosen candidate.
        seconds: for each candidate, total seconds of the plans of all batches; None if a batch
            does not fit. The first candidate is the default of the run.
    """

    cost: Cost
    key: K
    seconds: dict[K, float | None]

    @property
    def gain(self) -> float:
        """Fraction of the first candidate's time that the chosen candidate saves."""
        return self.gain_of(self.key)

    def gain_of(self, key: K) -> float:
        """Return the fraction of the first candidate's time that candidate ``key`` saves.

        The fraction is negative if ``key`` is slower, and 0 if one of the two does not fit.
        """
        (first, *_), taken = self.seconds.values(), self.seconds.get(key)
        return 1 - taken / first if first and taken else 0.0

    @property
    def comparison(self) -> str:
        """Text that compares every candidate with the first candidate."""
        (first, first_seconds), *others = self.seconds.items()
        parts = []
        for key, seconds in others:
            gain = self.gain_of(key)
            if seconds is None:
                parts.append(f"{key} fits no plan")
            elif first_seconds is None:
                parts.append(f"{key} fits, {first} does not")
            else:
                parts.append(f"{key} takes {abs(gain):.1%} {'less' if gain >= 0 else 'more'} time")
        return f"compared with {first}, {', '.join(parts)}"


def fastest[K: Hashable](
    candidates: Iterable[tuple[K, Cost, float | None]], pays: float
) -> RunChoice[K]:
    """Return the fastest of ``candidates``: (name or layers, cost model, total seconds).

    Another candidate replaces the first only if it saves more than the fraction ``pays`` of the
    first candidate's time. The seconds are None if a batch does not fit.
    """
    first, *others = candidates
    key, cost, least = first
    for other in others:
        required = 1 - pays if key == first[0] else 1.0
        if other[2] is not None and (least is None or other[2] < least * required):
            key, cost, least = other
    return RunChoice(cost, key, {name: seconds for name, _, seconds in (first, *others)})


def sketched_seconds(
    cost: Cost,
    batches: Sequence[Sequence[int]],
    options: Options,
    planner: str,
    effort: int = SKETCH_EFFORT,
) -> float | None:
    """Return the total seconds of low-effort plans for all batches; None if a batch does not fit.

    Args:
        cost: cost model, including the stages and parallel degrees.
        batches: lengths of the documents of one replica in each batch.
        options: planner options, such as levers and effort.
        planner: name of the planner.
        effort: maximum effort of the planner's search.
    """
    sketch = dataclasses.replace(
        options,
        effort=effort if options.effort is None else min(options.effort, effort),
        levers=options.levers - {"uneven"},
        open_layers=False,
    )
    total = 0.0
    for lengths in batches:
        try:
            planned = PLANNERS[planner](lengths, cost, sketch)
        except ValueError:
            return None
        if not planned.fits:
            return None
        total += planned.seconds
    return total


def heaviest(lengths: Sequence[int], cost: Cost, lockstep: int = 1) -> list[int]:
    """Return the lengths of the documents of the replica (or lockstep group) with the most work."""
    if cost.layout.dp == lockstep:
        return list(lengths)
    rates = rates_of(cost)
    assignments = balance_blocks(lengths, cost, cost.layout.dp // lockstep, lockstep)
    of_replicas = [[lengths[document] for document in assignment] for assignment in assignments]
    return max(of_replicas, key=lambda held: float(rates.document_seconds(np.array(held)).sum()))


def partition_of(
    cost: Cost, batches: Sequence[Sequence[int]], options: Options, planner: str
) -> RunChoice[tuple[int, ...]]:
    """Return the number of layers per stage that gives the fastest plans of ``batches``.

    Only the replica with the most work in each batch is planned.

    Args:
        cost: cost model, with the layers per stage to start from.
        batches: document lengths of each global batch of the job.
        options: planner options, such as levers and effort.
        planner: name of the planner.
    """
    held = [heaviest(lengths, cost) for lengths in batches]
    return partition_by_time(cost, held, lambda c: sketched_seconds(c, held, options, planner))


def partition_by_time(
    cost: Cost, batches: Sequence[Sequence[int]], seconds_of: Callable[[Cost], float | None]
) -> RunChoice[tuple[int, ...]]:
    """Return the fastest number of layers per stage, among at most ``MOST_TRIED`` partitions.

    ``seconds_of`` returns the total seconds of all ``batches`` for a cost model, or None if a batch
    does not fit. The first candidate is ``cost.layout.layers``.
    """
    tried: dict[tuple[int, ...], float | None] = {}

    def seconds(layers: tuple[int, ...]) -> float:
        if layers not in tried and len(tried) < MOST_TRIED:
            moved = with_layers(cost, layers)
            tried[layers] = None if moved is None else seconds_of(moved)
        taken = tried.get(layers)
        return np.inf if taken is None else taken

    at = cost.layout.layers
    seconds(at)
    features = expected_features(cost, batches)
    by_sums = fastest_layers(cost, features)
    if by_sums is not None and seconds(by_sums) < seconds(at):
        at = by_sums
    moved = True
    while moved and cost.layout.stages > 1 and len(tried) < MOST_TRIED:
        moved = False
        for other in _neighbours(at, stage_layer_seconds(cost, features), cost):
            if seconds(other) < seconds(at):
                at, moved = other, True
                break
    candidates = ((layers, cost.replace(layers=layers), taken) for layers, taken in tried.items())
    return fastest(candidates, PARTITION_PAYS)


def _neighbours(
    layers: tuple[int, ...], seconds: np.ndarray, cost: Cost
) -> Iterator[tuple[int, ...]]:
    """Yield variants of ``layers`` (per stage) with one layer moved from a slow to a fast rank.

    The layer moves from one of the two slowest ranks to one of the two fastest. ``seconds``
    [stages, layers] contains the seconds of every layer on every stage.
    """
    ends = np.cumsum(layers)
    least = [1] * (len(layers) - 1) + [cost.layout.pinned_layers]
    parts = [
        own[end - count : end].sum() for own, end, count in zip(seconds, ends, layers, strict=True)
    ]
    taken, on = (
        np.array(cost.layout.placement.of_ranks(parts)),
        np.array(cost.layout.placement.place),
    )
    for slow in np.argsort(-taken, kind="stable")[:2]:
        # The fastest ranks first.
        for fast in np.argsort(taken, kind="stable")[:2]:
            for give in np.flatnonzero(on == slow):
                for take in np.flatnonzero(on == fast):
                    if slow == fast or layers[give] <= least[give]:
                        continue
                    moved = list(layers)
                    moved[give] -= 1
                    moved[take] += 1
                    yield tuple(moved)


def placement_of(
    cost: Cost, batches: Sequence[Sequence[int]], options: Options, planner: str
) -> RunChoice[str]:
    """Return the placement with the fastest plans over ``batches``.

    Candidates are one stage per rank and ``PLACEMENT_NAMES``, each with layers balanced by time.

    Args:
        cost: cost model with one stage per rank.
        batches: document lengths of each global batch of the job.
        options: planner options, such as levers and effort.
        planner: name of the planner.
    """

    def candidates() -> Iterator[tuple[str, Cost, float | None]]:
        for name in (EVENLY, *PLACEMENT_NAMES):
            placed = cost if name == EVENLY else placed_cost(cost, name)
            if placed is None or (
                name != EVENLY and with_layers(placed, placed.layout.layers) is None
            ):
                yield name, cost, None
                continue
            partition = partition_of(placed, batches, options, planner)
            yield name, partition.cost, partition.seconds[partition.key]

    return fastest(candidates(), PLACEMENT_PAYS)


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
    if cost.layout.ep > cost.layout.tp * cost.layout.cp:
        return "experts are spread over replicas"
    if is_of_cpu(cost.layout.profile):
        # scripts/bench/results/2026-11-22-cpu-vocab.md; 24% less time was predicted.
        return "on a CPU it took 1.16 of the time (measured)"
    return None


def vocabulary_of(
    cost: Cost,
    batches: Sequence[Sequence[int]],
    options: Options,
    planner: str,
    cut: Cost | None = None,
) -> RunChoice[str]:
    """Return the faster of ``cost`` without and with vocabulary parallelism.

    Only the replica with the most work in each batch is planned.

    Args:
        cost: cost model, including the stages and parallel degrees.
        batches: document lengths of each global batch of the job.
        options: planner options, such as levers and effort.
        planner: name of the planner.
        cut: cost model for vocabulary parallelism if it needs other layers per stage; default:
            ``cost``.
    """
    uncut = cost.with_vocabulary(False)
    if ruled_out(cost) is not None:
        return RunChoice(uncut, OFF, {OFF: None})
    held = [heaviest(lengths, uncut) for lengths in batches]
    costs = {OFF: uncut, ON: (cut or cost).with_vocabulary(True)}
    sketches = {key: sketched_seconds(each, held, options, planner) for key, each in costs.items()}

    def choice() -> RunChoice[str]:
        return fastest(((k, c, sketches[k]) for k, c in costs.items()), VOCABULARY_PAYS)

    if choice().key == OFF:
        return choice()
    bound = sum(
        lower_bound_seconds(np.sort(lengths)[::-1], uncut, local="local" in options.levers)
        for lengths in held
    )
    off = math.inf if (taken := sketches[OFF]) is None else taken
    if off > DOUBTFUL * bound / options.lockstep:
        again = sketched_seconds(uncut, held, options, planner, MANY_EFFORT)
        if again is not None:
            sketches[OFF] = min(off, again)
    return choice()
