"""The plan of a call: its micro-batches whole or cut, in the order that takes least."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_epp.ir import FULL, KEEP, KIND_CODE, Kind, Op, Plan, Prediction
from megatron_epp.planner.calls.call_cost import CallChunks, byte_table, token_table
from megatron_epp.planner.calls.call_options import AS_GIVEN, PAYS_FROM, PLANNED, CallOptions
from megatron_epp.planner.calls.cuttings import cuttings
from megatron_epp.planner.calls.group_order import (
    best_order,
    flow_seconds,
    forward_order,
    given_order,
    problem_of_call,
    search_ops,
)
from megatron_epp.planner.calls.interleaved import interleaved_plan
from megatron_epp.planner.calls.microbatch import MicrobatchShape
from megatron_epp.planner.calls.recompute import RecomputeFit
from megatron_epp.planner.calls.tree_cutting import Parents
from megatron_epp.planner.chunks.slicing import Rates


def whole_plan(
    shapes: Sequence[MicrobatchShape],
    layers: Sequence[int],
    rates_SK3: np.ndarray,
    options: CallOptions,
    forward_only: bool,
    ranks: int = 0,
) -> Plan:
    """Every micro-batch a chunk of its own, in the order that takes least.

    rates_SK3   [stages, kinds, 3] by which seconds follow (stage_seconds)
    ranks       of a pipeline that is interleaved: stage s lies on rank s modulo ``ranks``

    PlanError: nothing holds as little as ``options.memory`` wants.
    """
    tokens = tuple(shape.tokens for shape in shapes)
    whole = CallChunks.of([[[(number, 0, count)]] for number, count in enumerate(tokens)], tokens)
    pairs = np.array([shape.pairs for shape in shapes])
    whole = replace(whole, chunking=replace(whole.chunking, pairs=pairs))
    if ranks:
        return interleaved_plan(whole, layers, rates_SK3, options, forward_only, ranks)
    return _fastest([whole], layers, rates_SK3, options, forward_only)


def sliced_plan(
    lengths: Sequence[Sequence[int]],
    layers: Sequence[int],
    rates_SK3: np.ndarray,
    options: CallOptions,
    forward_only: bool,
    parents: Sequence[Parents] = (),
) -> Plan:
    """As :func:`whole_plan`, micro-batches cut or whole; lengths[micro-batch] of documents. On one
    stage, where cutting saves bytes and no time, only those that do not fit whole are.

    parents   of every micro-batch, where documents continue others of it, which are computed once
    """
    whole = [KIND_CODE[kind] for kind in (Kind.FORWARD, Kind.BACKWARD)]
    mean_3 = rates_SK3[:, whole].sum(axis=1).mean(axis=0)
    cut = None
    if len(layers) == 1 and options.memory is not None and not parents:
        cut = [n for n, of in enumerate(lengths) if not _fits(of, layers, rates_SK3, options)]
    candidates = list(cuttings(lengths, Rates(*mean_3.tolist()), cut, parents))
    return _fastest(candidates, layers, rates_SK3, options, forward_only)


def _fits(
    lengths: Sequence[int], layers: Sequence[int], rates_SK3: np.ndarray, options: CallOptions
) -> bool:
    """Whether one stage holds a micro-batch whole, with nothing recomputed."""
    assert options.memory is not None
    spans = [(number, 0, length) for number, length in enumerate(lengths)]
    alone = CallChunks.of([[spans]], lengths)
    cost = options.memory.cost(layers)
    table = byte_table(alone, rates_SK3, cost, np.zeros((1, 1)))
    problem = problem_of_call(alone, table, np.array(cost.device_budget_bytes))
    return given_order(problem, alone.sizes).schedule.over_bytes <= 0


def _fastest(
    cuttings: Sequence[CallChunks],
    layers: Sequence[int],
    rates_SK3: np.ndarray,
    options: CallOptions,
    forward_only: bool,
) -> Plan:
    """The plan of the cutting that takes least; the first has whole micro-batches."""
    whole, stages = cuttings[0], len(layers)
    unbounded = problem_of_call(whole, token_table(whole, rates_SK3), np.full(stages, np.inf))
    given = given_order(unbounded, whole.sizes)
    as_given = _plan(whole, layers, given.ops(whole.sizes), given.seconds, AS_GIVEN)
    memory = None if forward_only else options.memory
    if not (forward_only or memory or options.reorder or options.split):
        return as_given
    ops = max(1, search_ops(given.seconds) // len(cuttings))
    room = options.room(whole.loads.tokens.tolist(), stages)
    best: Plan | None = None
    for cutting in cuttings:
        if forward_only:
            made: Plan | None = _forwards(cutting, layers, rates_SK3, options)
        else:
            made = _training(cutting, layers, rates_SK3, options, room, ops)
        if made is not None and (best is None or _seconds(made) < _seconds(best) * (1 - PAYS_FROM)):
            best = made
    if memory is not None and best is None:
        of = "slices" if len(cuttings) > 1 else "whole micro-batches"
        raise memory.too_little(of, int(whole.loads.tokens.max()))
    if best is None:
        return as_given
    pays = forward_only or memory or options.pays(_seconds(best), given.seconds)
    return best if pays else as_given


def _training(
    call: CallChunks,
    layers: Sequence[int],
    rates_SK3: np.ndarray,
    options: CallOptions,
    room: np.ndarray,
    ops: int,
) -> Plan | None:
    """Forwards and backwards of ``call``, within ``room`` tokens or the options' bytes; None where
    no order is."""
    free = options.split, options.reorder, ops
    again = None
    if options.memory is not None:
        fitted = RecomputeFit(call, rates_SK3, tuple(layers), options.memory).best(*free)
        found, again = fitted or (None, None)
    else:
        problem = problem_of_call(call, token_table(call, rates_SK3), room)
        alone = len(layers) == 1
        found = (
            given_order(problem, call.sizes) if alone else best_order(problem, call.sizes, *free)
        )
    if found is None:
        return None
    return _plan(call, layers, found.ops(call.sizes), found.seconds, PLANNED, again)


def _forwards(
    call: CallChunks, layers: Sequence[int], rates_SK3: np.ndarray, options: CallOptions
) -> Plan:
    """Forwards alone, in one order for all stages: as they stand, or whole micro-batches in another
    where that pays."""
    seconds_SC = np.asarray(token_table(call, rates_SK3).seconds[Kind.FORWARD])
    order, by = tuple(range(call.chunking.count)), AS_GIVEN
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
    """again: layers [stages, chunks] that are recomputed; None: nothing is."""
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
