"""Several stages on a rank: a load is scheduled with just enough recompute."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatron_epp.cost.build import even_layers
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import FULL, OFFLOAD, Kind, rules_for
from megatron_epp.planner.block_table import table_of
from megatron_epp.planner.chunks.chunking import backward_order, last_of_groups, starts_of
from megatron_epp.planner.order.list_scheduler import Policy, Schedule, list_schedule
from megatron_epp.planner.order.problem import (
    ScheduleProblem,
    every_layer,
    left_layers,
    with_kept,
)
from megatron_epp.planner.result import SimulatedPipeline
from megatron_epp.sim.engine import OpArrays
from megatron_epp.sim.inputs import op_arrays

SHARE_STEPS = 8  # shares of a stage's layers that are recomputed or offloaded
WARMER = (0.75, 1.0, 1.5, 2.5)  # times the forwards that fill the pipeline once
PATIENCE = 0.5  # of Policy
PlacementName = Literal["one", "interleaved", "wave"]


def placement(name: PlacementName, ranks: int) -> tuple[int, ...]:
    """The rank of every stage.

    one           0 1 2 3
    interleaved   0 1 2 3 0 1 2 3
    wave          0 1 2 3 3 2 1 0   as in V schedules: the ends lie on one rank
    """
    once = tuple(range(ranks))
    return {"one": once, "interleaved": once + once, "wave": once + once[::-1]}[name]


def interleaved_warm_up(ranks: int, stages: int) -> np.ndarray:
    """[ranks] forwards before the first pair of a forward and a backward, as Megatron's interleaved
    schedule has them."""
    return 2 * (ranks - 1 - np.arange(ranks)) + stages - ranks


def warm_up_policy(place: tuple[int, ...], chunks: int, warm: np.ndarray, **how: bool) -> Policy:
    """Forwards go first on a rank until ``warm`` [ranks] of them wait for their backwards, then
    backwards; ``strict``: and never more forwards. ``split``, ``deep``: of Policy."""
    backwards = np.arange(chunks * int(np.bincount(place).max()))
    first = backwards[None] + warm[:, None]
    most = first if how.pop("strict") else np.full_like(first, len(place) * chunks)
    return Policy(np.zeros_like(first), first, most, patience=PATIENCE, **how)


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """``cost`` of as many stages as have a rank in ``place``; chunks in groups of ``sizes``."""

    cost: Cost
    place: tuple[int, ...]
    loads: Loads
    sizes: np.ndarray
    change: Callable[[OpArrays], OpArrays] = lambda work: work
    head_in_layers: bool = False  # what ``change`` makes of H and G

    @classmethod
    def even(cls, cost: Cost, place: tuple[int, ...], *chunks: Any) -> "Setup":
        """Even layers; the cost as if every stage had a device like that of its rank."""
        layers = even_layers(sum(cost.layout.layers), len(place))
        budget = (max(cost.device_budget_bytes),) * len(place)
        devices = cost.layout.unlike_devices
        on = tuple(devices[rank] for rank in place) if devices else ()
        if on:
            budget = tuple(cost.device_budget_bytes[rank] for rank in place)
        layout = cost.layout.on_devices(on, layers=layers)
        staged = cost.replace(layout=layout, device_budget_bytes=budget)
        return cls(staged, place, *chunks)

    @property
    def ranks(self) -> int:
        return max(self.place) + 1

    @property
    def resident_bytes(self) -> np.ndarray:
        """[ranks] the states of all its stages."""
        return np.bincount(self.place, weights=np.array(self.cost.memory.states_bytes))

    @property
    def headroom_bytes(self) -> np.ndarray:
        """[ranks]"""
        first = [self.place.index(rank) for rank in range(self.ranks)]
        on = [self.cost.layout.placement.place[stage] for stage in first]
        return np.array(self.cost.device_budget_bytes)[on] - self.resident_bytes


@dataclass(frozen=True, slots=True, eq=False)
class TimedSetup:
    """counts of layers by choice, and what came out."""

    setup: Setup
    counts: Counts
    found: Schedule
    note: str

    @property
    def rank(self) -> tuple[float, float]:
        return self.found.over_bytes, self.found.seconds

    @property
    def busy_seconds(self) -> np.ndarray:
        """[ranks]"""
        return (self.found.stop - self.found.start).sum(axis=1)


# Of a setup: policies to try, and what is said of each.
Policies = Callable[[Setup], Iterator[tuple[Policy, str]]]


def best_of(setup: Setup, policies: Policies, *, offload: bool) -> TimedSetup:
    """The fastest of ``policies`` with as little recompute as fits; where ``offload``, layers are
    laid aside first, as far as the device has a rate to its host's memory."""
    plans: list[tuple[Counts, str]] = [({}, "")]
    chunks = setup.loads.chunks
    left = left_layers(setup.cost, {}, chunks)
    letters = [FULL]
    if offload and setup.cost.layout.profile.host_bytes_per_second > 0:
        letters = [OFFLOAD, FULL]
    for letter in letters:
        for step in range(1, SHARE_STEPS + 1):
            share = [np.ceil(grid * step / SHARE_STEPS) for grid in left]
            said = "offload" if letter == OFFLOAD else "recompute"
            plans.append((every_layer(letter, share), f"{said} {step}/{SHARE_STEPS}"))
    best: TimedSetup | None = None
    for counts, said in plans:
        table = table_of(setup.cost, setup.loads, with_kept(setup.cost, counts, chunks))
        rules = rules_for(setup.cost.layout.vocabulary_parallel and not setup.head_in_layers)
        work = setup.change(op_arrays(table, setup.loads, rules))
        starts = starts_of(setup.sizes)
        ends = backward_order(starts), last_of_groups(starts)
        problem = ScheduleProblem(work, *ends, setup.headroom_bytes, setup.place)
        for policy, how in policies(setup):
            found = list_schedule(problem, policy)
            played = TimedSetup(setup, counts, found, f"{how} {said}".rstrip())
            if best is None or played.rank < best.rank:
                best = played
        assert best is not None
        if best.found.over_bytes <= 0:
            break
    assert best is not None
    return best


def warm_ups(splits: Sequence[bool]) -> Policies:
    """Policies :func:`warm_up_policies` of a setup."""
    return lambda setup: warm_up_policies(setup.place, setup.sizes, splits)


def warm_up_policies(
    place: tuple[int, ...], sizes: np.ndarray, splits: Sequence[bool]
) -> Iterator[tuple[Policy, str]]:
    """Shorter and longer warm-ups, with backwards whole and split as ``splits`` says, for groups of
    ``sizes`` chunks."""
    # Forwards that fill the pipeline: those of one group on all stages of a rank, and what is under
    # way to the ranks behind.
    own = np.bincount(place)
    ranks = len(own)
    behind = (ranks - 1 - np.arange(ranks)) * (len(place) // ranks)
    fill = own * int(sizes.max()) + 2 * behind
    for factor in WARMER:
        warm = np.maximum(np.rint(fill * factor), own).astype(np.int64)
        for split in splits:
            how = f"{'split' if split else 'whole'} backwards, warm-up x {factor:g}"
            for deep, strict in ((True, False), (False, False), (True, True)):
                flags = {"split": split, "deep": deep, "strict": strict}
                yield warm_up_policy(place, int(sizes.sum()), warm, **flags), how


def result(
    planner: str, played: TimedSetup, bound_seconds: float, chunks: int, note: str
) -> SimulatedPipeline:
    setup, found = played.setup, played.found
    features = setup.cost.layout.features(setup.loads)
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    comm = sum(
        float((setup.cost.seconds.communication_per(kind) @ features).sum()) for kind in kinds
    )
    again = 0.0
    if played.counts:
        table = setup.cost.table_of(
            setup.loads, with_kept(setup.cost, played.counts, setup.loads.chunks)
        )
        again = float(np.sum(table.recompute_seconds))
    whole = setup.ranks * found.seconds
    peaks = tuple(int(peak) for peak in found.peak_bytes + setup.resident_bytes)
    return SimulatedPipeline(
        planner=planner,
        seconds=found.seconds,
        lower_bound_seconds=min(bound_seconds, found.seconds),
        bubble_ratio=1 - float(played.busy_seconds.sum()) / whole,
        recompute_ratio=again / whole,
        comm_ratio=comm / whole,
        peak_bytes=peaks,
        chunks=chunks,
        fits=found.over_bytes <= 0,
        note=f"{note}; {played.note}",
    )
