"""Plan of an external training loop's call: sliced or unsliced micro-batches, fastest order."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_epp.ir import FULL, KEEP, KIND_CODE, Kind, Op, Plan, Prediction
from megatron_epp.planner.calls.call_cost import CallChunks, byte_table, token_table
from megatron_epp.planner.calls.call_options import (
    AS_CALLED,
    PAYS_FROM,
    PLANNED,
    CallOptions,
    bytes_of_1f1b,
)
from megatron_epp.planner.calls.cuttings import cuttings
from megatron_epp.planner.calls.group_order import (
    best_order,
    call_order,
    flow_seconds,
    forward_order,
    problem_of_call,
    search_ops,
)
from megatron_epp.planner.calls.recompute import RecomputeFit
from megatron_epp.planner.chunks.slicing import Rates
from megatron_epp.planner.chunks.tree_cutting import Parents


def call_plan(
    lengths: Sequence[Sequence[int]],
    layers: Sequence[int],
    rates_SK3: np.ndarray,
    options: CallOptions,
    forward_only: bool,
    parents: Sequence[Parents] = (),
) -> Plan:
    """Return the fastest plan, with micro-batches sliced or unsliced.

    With one stage, slicing saves memory but no time. It then applies only to micro-batches that
    do not fit the memory budget. Without ``options.cut``, every micro-batch is one chunk.

    Args:
        lengths: lengths[m] contains the lengths in tokens of the documents of micro-batch m.
        layers: number of layers of every stage.
        rates_SK3: [stages, op kinds, 3] seconds per token, query-key pair and op.
        options: allowed changes to the order, and memory limits.
        forward_only: whether the call has no backwards.
        parents: parents[m][d] is the document that document d of micro-batch m continues, or -1;
            () if no document continues another.

    Raises:
        PlanError: if no order fits ``options.memory``.
    """
    forward_backward = [KIND_CODE[kind] for kind in (Kind.FORWARD, Kind.BACKWARD)]
    mean_3 = rates_SK3[:, forward_backward].sum(axis=1).mean(axis=0)
    cut: list[int] | None = None
    if not options.cut:
        cut = []
    elif len(layers) == 1 and options.memory is not None and not parents:
        cut = [n for n, of in enumerate(lengths) if not _fits(of, layers, rates_SK3, options)]
    candidates = list(cuttings(lengths, Rates(*mean_3.tolist()), cut, parents))
    return _fastest(candidates, layers, rates_SK3, options, forward_only)


def _fits(
    lengths: Sequence[int], layers: Sequence[int], rates_SK3: np.ndarray, options: CallOptions
) -> bool:
    """Return whether one unsliced micro-batch fits a single stage's memory without recompute."""
    assert options.memory is not None
    spans = [(number, 0, length) for number, length in enumerate(lengths)]
    alone = CallChunks.of([[spans]], lengths)
    cost = options.memory.cost(layers)
    table = byte_table(alone, rates_SK3, cost, np.zeros((1, 1)))
    problem = problem_of_call(alone, table, np.array(cost.device_budget_bytes))
    return call_order(problem, alone.sizes).schedule.over_bytes <= 0


def _fastest(
    cuttings: Sequence[CallChunks],
    layers: Sequence[int],
    rates_SK3: np.ndarray,
    options: CallOptions,
    forward_only: bool,
) -> Plan:
    """Return the fastest plan over ``cuttings``, whose first item slices no micro-batch.

    Without ``options.memory``, another order must gain enough to replace the caller's order.
    """
    uncut, stages = cuttings[0], len(layers)
    unbounded = problem_of_call(uncut, token_table(uncut, rates_SK3), np.full(stages, np.inf))
    called = call_order(unbounded, uncut.sizes)
    as_called = _plan(uncut, layers, called.ops(uncut.sizes), called.seconds, AS_CALLED)
    memory = None if forward_only else options.memory
    if not (forward_only or memory or options.reorder or options.split):
        return as_called
    held = bytes_of_1f1b(uncut.loads.tokens.tolist(), stages, options.token_bytes)
    budgets = list(options.budgets(held))
    # Divided by 2 for the two budgets that exist without headroom.
    ops = max(1, search_ops(called.seconds) // (2 * len(cuttings)))
    best: Plan | None = None
    for cutting in cuttings:
        if forward_only:
            tried: Plan | None = _forwards(cutting, layers, rates_SK3, options)
        else:
            tried = _training(cutting, layers, rates_SK3, options, budgets, ops)
        if tried is not None and (
            best is None or _seconds(tried) < _seconds(best) * (1 - PAYS_FROM)
        ):
            best = tried
    if memory is not None and best is None:
        of = "slices" if len(cuttings) > 1 else "whole micro-batches"
        raise memory.too_little(of, int(uncut.loads.tokens.max()))
    if best is None:
        return as_called
    pays = forward_only or memory or options.pays(_seconds(best), called.seconds)
    return best if pays else as_called


def _training(
    call: CallChunks,
    layers: Sequence[int],
    rates_SK3: np.ndarray,
    options: CallOptions,
    budgets: Sequence[np.ndarray],
    ops: int,
) -> Plan | None:
    """Return the fastest training plan that fits, or None if no order of ops fits.

    The limit is ``options.memory``; if this is None, the last of ``budgets``.
    """
    free = options.split, options.reorder, ops
    again = None
    if options.memory is not None:
        fitted = RecomputeFit(call, rates_SK3, tuple(layers), options.memory).best(*free)
        ordered, again = fitted or (None, None)
    else:
        table = token_table(call, rates_SK3, options.token_bytes)
        problem = problem_of_call(call, table, budgets[-1])
        alone = len(layers) == 1
        ordered = (
            call_order(problem, call.sizes)
            if alone
            else best_order(problem, call.sizes, *free, budgets)
        )
    if ordered is None:
        return None
    return _plan(call, layers, ordered.ops(call.sizes), ordered.seconds, PLANNED, again)


def _forwards(
    call: CallChunks, layers: Sequence[int], rates_SK3: np.ndarray, options: CallOptions
) -> Plan:
    """Return a forward-only plan with one order for all stages.

    Unsliced micro-batches are reordered if the predicted gain is large enough.
    """
    seconds_SC = np.asarray(token_table(call, rates_SK3).seconds[Kind.FORWARD])
    order, by = tuple(range(call.chunking.count)), AS_CALLED
    if options.reorder and call.chunking.groups == len(order):
        other = forward_order(seconds_SC)
        if options.pays(flow_seconds(seconds_SC, other), flow_seconds(seconds_SC, order)):
            order, by = other, PLANNED
    ops = tuple(Op(Kind.FORWARD, chunk) for chunk in order)
    return _plan(call, layers, (ops,) * len(layers), flow_seconds(seconds_SC, order), by)


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.seconds


def _plan(
    call: CallChunks,
    layers: Sequence[int],
    orders: tuple[tuple[Op, ...], ...],
    seconds: float,
    by: str,
    again: np.ndarray | None = None,
) -> Plan:
    """Return the plan with ``orders``; ``again`` counts recomputed layers [stages, chunks]."""
    counts = np.zeros((len(layers), call.chunking.count)) if again is None else again
    return replace(
        call.plan(layers),
        recompute=tuple(
            tuple(FULL * int(n) + KEEP * int(count - n) for n in row)
            for count, row in zip(layers, counts, strict=True)
        ),
        orders=orders,
        predicted=Prediction(seconds, (0.0,) * len(layers), by),
    )
