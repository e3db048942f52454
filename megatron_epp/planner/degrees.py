"""Choosing context-parallel and pipeline degrees where the user leaves them open."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import planner_of
from megatron_epp.planner.result import Planned

# Splits that are planned once more with the whole effort, after a quick look at all.
FINALISTS = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen degrees and the plan that they lead to; ``tried``: seconds of every split that
    fits, by (cp, pp), as the quick look saw them."""

    cp: int
    pp: int
    cost: Cost
    planned: Planned
    tried: tuple[tuple[int, int, float], ...]


def splits(
    devices: int, layers: int, cp: int | None = None, pp: int | None = None
) -> Iterator[tuple[int, int]]:
    """(cp, pp) with cp * pp = devices, at most a stage per layer; ``cp`` or ``pp`` where given."""
    for stages in range(1, min(devices, layers) + 1):
        if devices % stages:
            continue
        group = devices // stages
        if (cp is None or group == cp) and (pp is None or stages == pp):
            yield group, stages


def choose(
    lengths: Sequence[int],
    make_cost: Callable[[int, int], Cost],
    devices: int,
    layers: int,
    options: Options,
    planner: str = "epp",
    cp: int | None = None,
    pp: int | None = None,
) -> Choice:
    """The split of ``devices`` (of one replica, by TP group) whose plan is fastest.

    make_cost    the cost of (cp, pp); a ValueError where model or states do not fit
    ValueError   where no split fits, with the reason of the last
    """
    plan = planner_of(planner)
    quick = dataclasses.replace(options, effort=min(options.effort, 1))
    tried: list[tuple[float, int, int, Cost, Planned]] = []
    reason = "there is none"
    for group, stages in splits(devices, layers, cp, pp):
        try:
            cost = make_cost(group, stages)
            planned = plan(lengths, cost, quick)
        except ValueError as error:
            reason = str(error)
            continue
        if planned.fits:
            tried.append((planned.seconds, group, stages, cost, planned))
        else:
            reason = f"cp {group}, pp {stages}: the plan exceeds the memory budget"
    if not tried:
        raise ValueError(f"no split of {devices} devices into cp x pp fits: {reason}")
    tried.sort(key=lambda entry: entry[:3])
    best: Choice | None = None
    seen = tuple((group, stages, seconds) for seconds, group, stages, _, _ in tried)
    for _, group, stages, cost, planned in tried[:FINALISTS]:
        if options.effort > quick.effort:
            planned = plan(lengths, cost, options)
        if best is None or planned.seconds < best.planned.seconds:
            best = Choice(group, stages, cost, planned, seen)
    assert best is not None
    return best
