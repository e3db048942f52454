"""InfiniPipe's diagonal program (eqs 15 to 20): how many layers to recompute.

Recompute on one stage delays all other stages equally. Chunks that other stages process at the same
time can therefore recompute at no extra cost. A slot is a diagonal through the stages: the k-th
backward of stage s belongs to slot k + d, where d stages follow s. The program has one integer per
slot: the number of layers that each chunk in the slot recomputes. The constraint is that every
stage stays within its memory budget at every op.
"""

from collections.abc import Callable
from dataclasses import dataclass

import highspy
import numpy as np

from megatron_epp.sim.jit import njit

MIP_GAP = 0.02  # relative gap of the paper
# Work limit of the solver, in place of a time limit. Real programs need a few dozen nodes.
MIP_NODES = 400


@dataclass(frozen=True, slots=True)
class MemoryRows:
    """Constraints freed @ layers >= missing_bytes, with one row per backward that lacks memory.

    Row r consists of the entries starts[r] to starts[r + 1] - 1 of ``slot`` (indices of columns)
    and ``freed`` (bytes per layer). A step changes a layer to a recompute mode that frees more
    bytes. A slot is a diagonal through the stages. ``steps`` is the number of steps, and ``slots``
    that of slots. Column step * slots + slot is the number of layers of a slot that take the step.
    """

    slots: int
    steps: int
    starts: np.ndarray
    slot: np.ndarray
    freed: np.ndarray
    missing_bytes: np.ndarray

    @property
    def columns(self) -> int:
        """Number of variables of the program."""
        return self.slots * self.steps


def memory_rows(
    least: np.ndarray,
    backward_order: np.ndarray,
    moves: np.ndarray,
    freed: np.ndarray,
    budget: np.ndarray,
    wanted: np.ndarray | None = None,
) -> MemoryRows:
    """Return the memory constraints of the order of F and B that ``least`` defines.

    The row of a backward limits the highest memory since the stage's previous backward.

    Args:
        least: [stages, chunks] number of forwards before the k-th backward (planner.order.warmup).
        backward_order: [chunks] chunks in the order of their backwards.
        moves: [kinds, 2, stages, chunks] bytes that F and B allocate and free without recompute
            (OpArrays.moved_bytes).
        freed: [steps, stages, chunks] bytes that a step to the next recompute mode frees per layer.
        budget: [stages] bytes available besides the model states.
        wanted: [stages, chunks] whether backward k of a stage may get a row; default: all may.
    """
    steps, stages, count = freed.shape
    slot = np.empty(count, dtype=np.int64)
    slot[backward_order] = np.arange(count)
    if wanted is None:
        wanted = np.ones((stages, count), dtype=np.bool_)
    starts, slots, values, missing = _rows(
        least, backward_order, slot, moves, freed, budget, wanted
    )
    return MemoryRows(count + stages - 1, steps, starts, slots, values, missing)


@njit()
def _missing(least, backward_order, moves, saved, budget):
    """Return bytes above the budget [stages, chunks], and the maximum number of chunks in flight.

    Entry [s, k] is the maximum from backward k - 1 to backward k of stage s. It is negative if
    memory is left. ``saved`` [stages, chunks] contains the bytes that recompute frees.
    """
    stages, count = saved.shape
    missing = np.empty((stages, count))
    alive = 0
    for s in range(stages):
        held, f = 0.0, 0
        for k in range(count):
            tightest = -np.inf
            while f < least[s, k]:
                held += moves[0, 0, s, f] - saved[s, f]
                tightest = max(tightest, held)
                held -= moves[0, 1, s, f]
                f += 1
            alive = max(alive, f - k)
            c = backward_order[k]
            held += moves[1, 0, s, c]
            missing[s, k] = max(tightest, held) - budget[s]
            held -= moves[1, 1, s, c] - saved[s, c]
    return missing, alive


@njit()
def _rows(least, backward_order, slot_of, moves, freed, budget, wanted):
    steps, stages, count = freed.shape
    total = count + stages - 1
    # Two passes: count, then fill. A backward gets a row if it would exceed the budget.
    starts = np.zeros(1, dtype=np.int64)
    slots = np.zeros(0, dtype=np.int64)
    values = np.zeros(0)
    missing = np.zeros(0)
    for fill in range(2):
        row, entry = 0, 0
        for s in range(stages):
            held, f, low = 0.0, 0, 0
            done = np.zeros(count, dtype=np.bool_)
            for k in range(count):
                tightest = -np.inf
                at = 0
                # Forwards only add memory, except for workspace: only the worst forward of a run
                # gets a row.
                while f < least[s, k]:
                    held += moves[0, 0, s, f]
                    if held - budget[s] > tightest:
                        tightest, at = held - budget[s], f
                    held -= moves[0, 1, s, f]
                    f += 1
                c = backward_order[k]
                held += moves[1, 0, s, c]
                if held - budget[s] >= tightest:
                    tightest, at = held - budget[s], f - 1
                if tightest > 0 and wanted[s, k]:
                    for alive in range(low, at + 1):
                        if not done[alive]:
                            for step in range(steps):
                                if fill == 1:
                                    slot = slot_of[alive] + stages - 1 - s
                                    slots[entry] = step * total + slot
                                    values[entry] = freed[step, s, alive]
                                entry += 1
                    if fill == 1:
                        missing[row] = tightest
                        starts[row + 1] = entry
                    row += 1
                held -= moves[1, 1, s, c]
                done[c] = True
                while low < count and done[low]:
                    low += 1
        if fill == 0:
            starts = np.zeros(row + 1, dtype=np.int64)
            slots = np.zeros(entry, dtype=np.int64)
            values = np.zeros(entry)
            missing = np.zeros(row)
    return starts, slots, values, missing


def within(
    least: np.ndarray, backward_order: np.ndarray, moves: np.ndarray, budget: np.ndarray
) -> np.ndarray:
    """Return [stages]: whether the order of F and B that ``least`` defines fits in memory.

    Arguments are those of :func:`memory_rows`.
    """
    missing, _ = _missing(least, backward_order, moves, np.zeros(least.shape), budget)
    return (missing <= 0).all(axis=1)


# Above MANY_ENTRIES entries the program is solved by row generation: start with FIRST_ROWS rows per
# stage, and add violated rows in at most ROW_ROUNDS rounds. Deep pipelines have millions of
# entries, few of which bind. Chosen by hand for their planning time.
MANY_ENTRIES = 60_000
ROW_ROUNDS = 12
FIRST_ROWS = 8


def solve_order(
    solver: "Solver",
    least: np.ndarray,
    backward_order: np.ndarray,
    moves: np.ndarray,
    freed: np.ndarray,
    budget: np.ndarray,
    most: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    integer: bool = True,
) -> np.ndarray | None:
    """Return the number [steps, slots] of layers to recompute in the order that ``least`` defines.

    Args:
        solver: the solver.
        least: [stages, chunks] number of forwards before the k-th backward (planner.order.warmup).
        backward_order: [chunks] chunks in the order of their backwards.
        moves: [kinds, 2, stages, chunks] bytes that F and B allocate and free without recompute
            (OpArrays.moved_bytes).
        freed: [steps, stages, chunks] bytes that a step to the next recompute mode frees per layer.
        budget: [stages] bytes available besides the model states.
        most: [columns] maximum number of layers per step and slot.
        weights: [columns] cost of a layer; default 1.
        integer: whether to solve the integer program (2% gap) or its relaxation, rounded up.

    Returns:
        The number of layers, or None if the order does not fit even with ``most`` layers. For
        large programs, solved in ROW_ROUNDS rounds, the order may still exceed the budget.
    """
    steps, stages, count = freed.shape
    slots = count + stages - 1
    missing, alive = _missing(least, backward_order, moves, np.zeros((stages, count)), budget)
    if (missing <= 0).all():
        return np.zeros((steps, slots), dtype=np.int64)
    if (missing > 0).sum() * alive * steps <= MANY_ENTRIES:
        rows = memory_rows(least, backward_order, moves, freed, budget)
        solution = solve_rows(solver, rows, most, weights, integer=integer)
        return None if solution is None else solution.reshape(steps, slots)
    wanted = np.zeros((stages, count), dtype=np.bool_)
    for _ in range(ROW_ROUNDS):
        _want_worst(wanted, missing)
        rows = memory_rows(least, backward_order, moves, freed, budget, wanted)
        solution = solve_rows(solver, rows, most, weights, integer=integer)
        if solution is None:
            return None
        layers = solution.reshape(steps, slots)
        saved = sum(
            freed[step] * broadcast_diagonals(layers[step], backward_order, stages)
            for step in range(steps)
        )
        missing, _ = _missing(least, backward_order, moves, saved, budget)
        if (missing <= 0).all():
            return layers
    return layers


def _want_worst(wanted: np.ndarray, missing: np.ndarray) -> None:
    """Mark in ``wanted`` the worst of every few consecutive backwards, if it lacks memory."""
    stages, count = missing.shape
    width = max(1, count // FIRST_ROWS)
    for begin in range(0, count, width):
        part = missing[:, begin : begin + width]
        worst = part.argmax(axis=1)
        lacking = part[np.arange(stages), worst] > 0
        wanted[np.flatnonzero(lacking), begin + worst[lacking]] = True


class Solver:
    """Instance of the solver HiGHS that solves many programs.

    The creation of an instance takes longer than the solution of most programs.
    """

    def __init__(self) -> None:
        self.highs = highspy.Highs()
        self.highs.setOptionValue("output_flag", False)
        self.highs.setOptionValue("threads", 1)
        self.highs.setOptionValue("mip_rel_gap", MIP_GAP)
        self.highs.setOptionValue("mip_max_nodes", MIP_NODES)

    def run(
        self,
        rows: "MemoryRows",
        most: np.ndarray,
        weights: np.ndarray | None,
        integer: bool,
    ) -> np.ndarray:
        """Return the value of each column in the best solution; an empty array if there is none.

        Args:
            rows: the constraints.
            most: [columns] upper bounds.
            weights: [columns] cost of a layer; None for 1.
            integer: whether columns must be integers.
        """
        # Scale bytes so that the solver's absolute tolerances are far below one layer.
        scale, count = 1.0 / rows.missing_bytes.max(), len(rows.missing_bytes)
        kind = highspy.HighsVarType.kInteger if integer else highspy.HighsVarType.kContinuous
        self.highs.clearModel()
        # Relaxations are too small to gain from presolve; integer programs do gain.
        self.highs.setOptionValue("presolve", "on" if integer else "off")
        # Pass arrays: setting the fields of a HighsLp takes about as long as solving it.
        self.highs.passModel(
            rows.columns,
            count,
            len(rows.slot),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            np.ones(rows.columns) if weights is None else weights,
            np.zeros(rows.columns),
            most.astype(np.float64),
            rows.missing_bytes * scale,
            np.full(count, highspy.kHighsInf),
            rows.starts.astype(np.int32),
            rows.slot.astype(np.int32),
            rows.freed * scale,
            np.full(rows.columns, int(kind), np.int32),
        )
        self.highs.run()
        return np.array(self.highs.getSolution().col_value)


def solve_rows(
    solver: Solver,
    rows: MemoryRows,
    most: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    integer: bool = True,
) -> np.ndarray | None:
    """Return the number of layers per column (step and slot) with the least total cost.

    Args:
        solver: the solver.
        rows: the constraints.
        most: [columns] upper bounds.
        weights: [columns] cost of a layer; default 1, as in eq. 18.
        integer: whether to solve the integer program (2% gap) or its relaxation, rounded up.

    Returns:
        The number of layers, or None if even the upper bounds violate a constraint.
    """
    if not len(rows.missing_bytes):
        return np.zeros(rows.columns, dtype=np.int64)
    if not _enough(rows, most):
        return None
    solution = solver.run(rows, most, weights, integer)
    if len(solution) != rows.columns:
        return None
    # The solver's tolerance may violate a row slightly; rounding up then repairs it.
    layers = np.minimum(np.ceil(solution - 1e-6), most).astype(np.int64)
    return layers if _enough(rows, layers) else np.minimum(np.ceil(solution), most).astype(np.int64)


def _enough(rows: MemoryRows, layers: np.ndarray) -> bool:
    row_of = np.repeat(np.arange(len(rows.missing_bytes)), np.diff(rows.starts))
    freed = np.bincount(
        row_of, weights=rows.freed * layers[rows.slot], minlength=len(rows.missing_bytes)
    )
    return bool((freed >= rows.missing_bytes).all())


def reduce_diagonals(
    choose: Callable[..., np.ndarray], layers: np.ndarray, backward_order: np.ndarray
) -> np.ndarray:
    """Return [slots]: ``choose`` (such as nanmax) of ``layers`` [stages, chunks] on a diagonal."""
    stages, count = layers.shape
    on = np.full((stages, count + stages - 1), np.nan)
    for stage in range(stages):
        after = stages - 1 - stage
        on[stage, after : after + count] = layers[stage, backward_order]
    return choose(on, axis=0).astype(np.int64)


def broadcast_diagonals(layers: np.ndarray, backward_order: np.ndarray, stages: int) -> np.ndarray:
    """Return ``layers`` [slots] as an array [stages, chunks], equal on each diagonal (eq. 16)."""
    count = len(backward_order)
    slot = np.empty(count, dtype=np.int64)
    slot[backward_order] = np.arange(count)
    return layers[slot[None] + (stages - 1 - np.arange(stages))[:, None]]
