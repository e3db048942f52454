"""Recompute counts (layers per mode, stage and chunk) by InfiniPipe's diagonal program."""

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import Choice, Counts
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import FULL, KEEP, SELECTIVE
from megatron_epp.planner.order.problem import ScheduleProblem
from megatron_epp.planner.recompute import ilp

FULL_LAYERS = KEEP + FULL
# Useful recompute modes of every layer kind, from KEEP to FULL.
Ladders = tuple[str, ...]


def ladders(cost: Cost, loads: Loads, modes: Iterable[str] = SELECTIVE) -> Ladders:
    """Return, for every layer kind, the useful recompute modes in order (:func:`ladder`)."""
    modes = tuple(modes)
    return tuple(ladder(cost, loads, modes, kind) for kind in range(cost.layout.kinds.number))


def full_layers(cost: Cost) -> Ladders:
    """Return, for every layer kind, the two modes that save or fully recompute a layer."""
    return (FULL_LAYERS,) * cost.layout.kinds.number


def ladder(cost: Cost, loads: Loads, modes: Iterable[str] = SELECTIVE, kind: int = 0) -> str:
    """Return the useful recompute modes of a layer kind (a "ladder"), one letter per mode.

    The first mode saves all activations, and the last one recomputes the layer. Each step to the
    next mode costs fewer recompute seconds per freed byte than the following step. The modes are
    the lower convex hull of recompute seconds over freed bytes.

    Args:
        cost: cost model, including the stages and parallel degrees.
        loads: numbers of tokens and query-key pairs of the chunks.
        modes: selective recompute modes to consider.
        kind: index of the layer kind.
    """
    points = [(0.0, 0.0, KEEP)]
    kept = cost.memory.saved_bytes((kind, KEEP), loads)
    for mode in (*modes, FULL):
        freed = float(np.sum(kept - cost.memory.saved_bytes((kind, mode), loads)))
        seconds = float(np.sum(cost.seconds.recompute((kind, mode), loads)))
        if freed > 0:
            points.append((freed, seconds, mode))
    points.sort(key=lambda point: (point[0], point[1]))
    hull: list[tuple[float, float, str]] = []
    for freed, seconds, mode in points:
        while hull and hull[-1][1] >= seconds and hull[-1][0] <= freed and hull[-1][2] != KEEP:
            hull.pop()  # frees less and is slower
        while len(hull) >= 2 and _price(hull[-2], hull[-1]) >= _price(
            hull[-2], (freed, seconds, mode)
        ):
            hull.pop()
        if not hull or freed > hull[-1][0]:
            hull.append((freed, seconds, mode))
    return "".join(mode for _, _, mode in hull)


def _price(low: tuple[float, float, str], high: tuple[float, float, str]) -> float:
    return (high[1] - low[1]) / max(high[0] - low[0], 1e-9)


def freed_bytes(cost: Cost, loads: Loads, steps: str, kind: int = 0) -> np.ndarray:
    """Return the bytes that each step to the next mode frees per layer: [steps, stages, chunks].

    Args:
        cost: cost model, including the stages and parallel degrees.
        loads: numbers of tokens and query-key pairs of the chunks.
        steps: recompute modes in ascending order of freed bytes (:func:`ladder`).
        kind: index of the layer kind.
    """
    saved = np.stack([cost.memory.saved_bytes((kind, mode), loads) for mode in steps])
    per_step = saved[:-1] - saved[1:]
    return np.ascontiguousarray(np.repeat(per_step[:, None], cost.layout.stages, axis=1))


def diagonal_counts(
    solver: ilp.Solver,
    cost: Cost,
    loads: Loads,
    kept: ScheduleProblem,
    least: np.ndarray,
    *,
    integer: bool,
    steps: Ladders | None = None,
    headroom_bytes: np.ndarray | None = None,
    layers: Sequence[np.ndarray] | None = None,
) -> Counts | None:
    """Return the cheapest recompute that fits in memory with an in-flight limit, else None.

    Args:
        solver: solver of the program.
        cost: cost model, including the stages and parallel degrees.
        loads: numbers of tokens and query-key pairs of the chunks.
        kept: the scheduling problem without recompute.
        least: [stages, chunks] number of forwards before each backward.
        integer: whether to solve the integer program instead of its relaxation.
        steps: recompute modes of every layer kind (:func:`ladder`); default: save or recompute.
        headroom_bytes: [stages] bytes available besides the model states; default: as in ``kept``.
        layers: per layer kind, [stages, chunks] number of layers that are not offloaded; default:
            all layers.

    Returns:
        The number of layers [stages, chunks] by (layer kind, recompute mode), or None.
    """
    moves, headroom = kept.of_in_flight
    headroom = headroom if headroom_bytes is None else headroom_bytes
    steps = full_layers(cost) if steps is None else steps
    parts = []  # per kind: modes, bytes freed, most layers of a slot, layers not offloaded
    for kind, modes in enumerate(steps):
        freed = freed_bytes(cost, loads, modes, kind)
        left = None if layers is None else layers[kind]
        if cost.layout.kinds.number > 1 and left is None:
            left = np.tile(cost.layout.kinds.counts[kind][:, None], (1, kept.chunks))
        if left is None:
            # A slot spans all stages; the smallest stage limits its layers.
            every = np.tile(np.array(cost.layout.layers)[:, None], (1, kept.chunks))
            most = ilp.reduce_diagonals(np.nanmin, every, kept.backward_order)
        else:
            # A chunk recomputes at most its layers in ``left``; a stage may have few layers of a
            # kind, or none. The bytes freed grow up to this number of layers. The program assumes
            # instead that they grow linearly up to ``most``, which is exact at both ends. It
            # therefore finds a solution whenever recomputing all of ``left`` is a solution.
            most = ilp.reduce_diagonals(np.nanmax, left, kept.backward_order)
            reach = ilp.broadcast_diagonals(most, kept.backward_order, cost.layout.stages)
            freed = freed * (left / np.maximum(reach, 1))
        parts.append((modes, freed, most, left))
    weights = None
    if sum(len(modes) for modes in steps) > 2:
        prices, largest = [], 0.0
        for kind, modes in enumerate(steps):
            seconds = [float(cost.seconds.recompute((kind, mode), loads).mean()) for mode in modes]
            prices.append(np.diff(seconds))
            largest = max(largest, *seconds)
        price = np.maximum(np.concatenate(prices), 1e-9 * largest)
        weights = np.repeat(price / price.max(), len(parts[0][2]))
    solution = ilp.solve_order(
        solver,
        least,
        kept.backward_order,
        moves,
        np.concatenate([freed for _, freed, _, _ in parts]),
        headroom,
        np.concatenate([np.tile(most, len(modes) - 1) for modes, _, most, _ in parts]),
        weights,
        integer=integer,
    )
    if solution is None:
        return None
    counts: dict[Choice, np.ndarray] = {}
    row = 0
    for kind, (modes, _, _, left) in enumerate(parts):
        group_counts, row = solution[row : row + len(modes) - 1], row + len(modes) - 1
        # A layer on a step also counts on the steps below.
        taken = np.maximum.accumulate(group_counts[::-1])[::-1]
        grids = [
            ilp.broadcast_diagonals(step, kept.backward_order, cost.layout.stages) for step in taken
        ]
        if left is not None:
            grids = [np.minimum(grid, left) for grid in grids]
        for number, mode in enumerate(modes[1:]):
            above = grids[number + 1] if number + 1 < len(grids) else 0
            grid = (grids[number] - above).astype(np.float64)
            if grid.any():
                counts[kind, mode] = grid
    return counts
