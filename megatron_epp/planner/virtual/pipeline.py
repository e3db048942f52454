"""Shared parts of the virtual baselines: a load on virtual stages, played with recompute just
enough."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import FULL, KIND_CODE, OF_LAYERS, OFFLOAD, Kind
from megatron_epp.planner.order.problem import every_layer, left_layers, with_kept
from megatron_epp.planner.result import SimulatedPipeline
from megatron_epp.planner.virtual.schedule import VirtualSchedule, schedule
from megatron_epp.sim.engine import OpArrays
from megatron_epp.sim.inputs import op_arrays

STEPS = 8  # shares of a stage's layers that are recomputed or offloaded
WARMER = (0.75, 1.0, 1.5, 2.5)  # times the forwards that fill the pipeline once


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """``cost`` of as many stages as are placed on ``device_of``; chunks with their groups."""

    cost: Cost
    device_of: np.ndarray
    loads: Loads
    backward_order: np.ndarray
    last_of_group: np.ndarray
    change: Callable[[OpArrays], OpArrays] = lambda work: work

    @property
    def devices(self) -> int:
        return int(self.device_of.max()) + 1

    @property
    def room_bytes(self) -> np.ndarray:
        """[devices] beside the states of all its stages."""
        budget = np.full(self.devices, self.cost.budget_bytes[0])
        return budget - np.bincount(self.device_of, weights=np.array(self.cost.states_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """counts of layers by choice, and what came out."""

    setup: Setup
    counts: Counts
    work: OpArrays
    found: VirtualSchedule
    note: str

    @property
    def rank(self) -> tuple[float, float]:
        return self.found.over_bytes, self.found.seconds


def best_of(setup: Setup, *, splits: Sequence[bool], offload: bool) -> Played:
    """The fastest of a few warm-ups with as little recompute as fits; where ``offload``, layers are
    laid aside first, as far as the device has a rate to its host's memory."""
    plans: list[tuple[Counts, str]] = [({}, "")]
    chunks = setup.loads.chunks
    left = left_layers(setup.cost, {}, chunks)
    letters = [FULL]
    if offload and setup.cost.profile.host_bytes_per_second > 0:
        letters = [OFFLOAD, FULL]
    for letter in letters:
        for step in range(1, STEPS + 1):
            share = [np.ceil(grid * step / STEPS) for grid in left]
            said = "offload" if letter == OFFLOAD else "recompute"
            plans.append((every_layer(letter, share), f"{said} {step}/{STEPS}"))
    best: Played | None = None
    for counts, said in plans:
        table = setup.cost.table_of(setup.loads, with_kept(setup.cost, counts, chunks))
        work = setup.change(op_arrays(table, setup.loads))
        for played in _played(setup, counts, work, said, splits):
            if best is None or played.rank < best.rank:
                best = played
        assert best is not None
        if best.found.over_bytes <= 0:
            break
    assert best is not None
    return best


def _played(
    setup: Setup, counts: Counts, work: OpArrays, said: str, splits: Sequence[bool]
) -> Iterator[Played]:
    groups = np.bincount(np.unique(setup.last_of_group, return_inverse=True)[1])
    # Forwards that fill the pipeline: those of one group on all stages of a device, and what is
    # under way to the devices behind.
    stages, devices = len(setup.device_of), setup.devices
    own = np.bincount(setup.device_of)
    fill = own * int(groups.max()) + 2 * (devices - 1 - np.arange(devices)) * (stages // devices)
    for factor in WARMER:
        for split in splits:
            for deep, strict in ((True, False), (False, False), (True, True)):
                found = schedule(
                    work,
                    setup.backward_order,
                    setup.last_of_group,
                    setup.device_of,
                    setup.room_bytes,
                    np.maximum(np.rint(fill * factor), own).astype(np.int64),
                    split=split,
                    deep=deep,
                    strict=strict,
                )
                how = f"{'split' if split else 'whole'} backwards, warm-up x {factor:g}"
                yield Played(setup, counts, work, found, f"{how} {said}".rstrip())


def result(
    planner: str, played: Played, bound_seconds: float, chunks: int, note: str
) -> SimulatedPipeline:
    setup, found = played.setup, played.found
    features = setup.cost.features(setup.loads)
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    comm = sum(float((setup.cost.comm_seconds_per(kind) @ features).sum()) for kind in kinds)
    again = 0.0
    if played.counts:
        table = setup.cost.table_of(
            setup.loads, with_kept(setup.cost, played.counts, setup.loads.chunks)
        )
        again = float(np.sum(table.recompute_seconds))
    whole = setup.devices * found.seconds
    resident = np.bincount(setup.device_of, weights=np.array(setup.cost.states_bytes))
    peaks = tuple(int(peak) for peak in found.peak_bytes + resident)
    return SimulatedPipeline(
        planner=planner,
        seconds=found.seconds,
        lower_bound_seconds=min(bound_seconds, found.seconds),
        bubble_ratio=1 - float(found.busy_seconds.sum()) / whole,
        recompute_ratio=again / whole,
        comm_ratio=comm / whole,
        peak_bytes=peaks,
        chunks=chunks,
        fits=found.over_bytes <= 0,
        note=f"{note}; {played.note}",
    )


def spread_head(cost: Cost, stages: int) -> tuple[Cost, Callable[[OpArrays, np.ndarray], OpArrays]]:
    """``cost`` without its output layer, and what adds an equal share of its seconds to every
    stage: vocabulary parallelism with messages that cost nothing. Its bytes go with it."""
    profile = cost.profile
    nothing = {kind: type(each)() for kind, each in profile.last_seconds.items()}
    bare = dataclasses.replace(
        profile,
        last_seconds=nothing,
        last_bytes=type(profile.last_bytes)(),
        last_weight_input_bytes=type(profile.last_weight_input_bytes)(),
        last_workspace_bytes={
            kind: type(each)() for kind, each in profile.last_workspace_bytes.items()
        },
        last_parameters=0.0,
    )
    share = profile.last_parameters / stages
    layers = np.maximum(np.array(cost.layers), 1)
    if len(set(cost.layers)) == 1 and not profile.other_kinds:
        bare = dataclasses.replace(
            bare, layer_parameters=profile.layer_parameters + share / float(layers[0])
        )
    per = {
        kind: np.array([each.per_token, each.per_pair, each.per_chunk])
        for kind, each in profile.last_seconds.items()
    }

    def change(work: OpArrays, tokens: np.ndarray) -> OpArrays:
        seconds = work.seconds.copy()
        for kind in OF_LAYERS:
            token, _, chunk = per[kind]
            seconds[KIND_CODE[kind]] += (token * tokens / cost.shards + chunk) / stages
        return work._replace(seconds=seconds)

    return dataclasses.replace(cost, profile=bare), change
