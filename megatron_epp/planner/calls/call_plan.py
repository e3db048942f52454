"""Plan of an external training loop's call: sliced or unsliced micro-batches, fastest order."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from megatron_epp.ir import FULL, KEEP, KIND_CODE, Kind, Op, Plan, Prediction
from megatron_epp.planner.calls.call_cost import CallChunks, CallDocuments, byte_table, token_table
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


def call_plans(
    replicas: Sequence[CallDocuments],
    layers: Sequence[int],
    rates_SK3: np.ndarray,
    options: CallOptions,
    forward_only: bool,
) -> tuple[Plan, ...]:
    """Return the fastest plan of each replica, with micro-batches sliced or unsliced.

    If there are several replicas, they run in lockstep: their plans have the same ops and the same
    recompute. A chunk takes as long as on the slowest replica, and holds as many bytes as on the
    fullest one.

    Without ``options.cut``, every micro-batch is one chunk. With one stage, slicing saves memory
    but no time. If ``options.memory`` is given and no documents share prefixes, only micro-batches
    that do not fit are then sliced.

    Args:
        replicas: documents of every replica's micro-batches.
        layers: number of layers of every stage.
        rates_SK3: [stages, op kinds, 3] seconds per token, query-key pair and op.
        options: allowed changes to the order, and memory limits.
        forward_only: whether the call has no backwards.

    Raises:
        PlanError: if no order fits ``options.memory``.
    """
    forward_backward = [KIND_CODE[kind] for kind in (Kind.FORWARD, Kind.BACKWARD)]
    mean_3 = rates_SK3[:, forward_backward].sum(axis=1).mean(axis=0)
    cut: list[int] | None = None
    if not options.cut:
        cut = []
    elif len(layers) == 1 and options.memory is not None and not any(c.parents for c in replicas):
        cut = [
            number
            for number, of in enumerate(zip_longest(*(call.lengths for call in replicas)))
            if not all(_fits(each, layers, rates_SK3, options) for each in of if each)
        ]
    candidates = list(cuttings(replicas, Rates(*mean_3.tolist()), cut))
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
) -> tuple[Plan, ...]:
    """Return the fastest plans over ``cuttings``, whose first item slices no micro-batch.

    Without ``options.memory``, another order must gain enough to replace the caller's order.
    """
    uncut, stages = cuttings[0], len(layers)
    unbounded = problem_of_call(uncut, token_table(uncut, rates_SK3), np.full(stages, np.inf))
    called = call_order(unbounded, uncut.sizes)
    as_called = _plans(uncut, layers, called.ops(uncut.sizes), called.seconds, AS_CALLED)
    memory = None if forward_only else options.memory
    if not (forward_only or memory or options.reorder or options.split):
        return as_called
    held = bytes_of_1f1b(uncut.loads.tokens.tolist(), stages, options.token_bytes)
    budgets = list(options.budgets(held))
    # Divided by 2 for the two budgets that exist without headroom.
    ops = max(1, search_ops(called.seconds) // (2 * len(cuttings)))
    best: tuple[Plan, ...] | None = None
    for cutting in cuttings:
        if forward_only:
            tried: tuple[Plan, ...] | None = _forwards(cutting, layers, rates_SK3, options)
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
) -> tuple[Plan, ...] | None:
    """Return the fastest training plans that fit, or None if no order of ops fits.

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
    return _plans(call, layers, ordered.ops(call.sizes), ordered.seconds, PLANNED, again)


def _forwards(
    call: CallChunks, layers: Sequence[int], rates_SK3: np.ndarray, options: CallOptions
) -> tuple[Plan, ...]:
    """Return forward-only plans with one order for all stages.

    Unsliced micro-batches are reordered if the predicted gain is large enough.
    """
    seconds_SC = np.asarray(token_table(call, rates_SK3).seconds[Kind.FORWARD])
    order, by = tuple(range(call.chunking.count)), AS_CALLED
    if options.reorder and call.chunking.groups == len(order):
        other = forward_order(seconds_SC)
        if options.pays(flow_seconds(seconds_SC, other), flow_seconds(seconds_SC, order)):
            order, by = other, PLANNED
    ops = tuple(Op(Kind.FORWARD, chunk) for chunk in order)
    return _plans(call, layers, (ops,) * len(layers), flow_seconds(seconds_SC, order), by)


def _seconds(plans: Sequence[Plan]) -> float:
    assert plans[0].predicted is not None
    return plans[0].predicted.seconds


def _plans(
    call: CallChunks,
    layers: Sequence[int],
    orders: tuple[tuple[Op, ...], ...],
    seconds: float,
    by: str,
    again: np.ndarray | None = None,
) -> tuple[Plan, ...]:
    """Return the plans with ``orders``; ``again`` counts recomputed layers [stages, chunks]."""
    counts = np.zeros((len(layers), call.chunking.count)) if again is None else again
    recompute = tuple(
        tuple(FULL * int(n) + KEEP * int(count - n) for n in row)
        for count, row in zip(layers, counts, strict=True)
    )
    predicted = Prediction(seconds, (0.0,) * len(layers), by)
    return tuple(
        replace(plan, recompute=recompute, orders=orders, predicted=predicted)
        for plan in call.plans(layers)
    )
