"""The plan of a call: whole micro-batches in the order that takes least."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_epp.ir import KEEP, Chunk, Kind, Op, Plan, Prediction, Span
from megatron_epp.planner.calls.extent import Extent
from megatron_epp.planner.calls.memory import Memory
from megatron_epp.planner.calls.stage_seconds import features

GAIN = 0.015  # at least so much faster than the caller's order, or it is not worth another
# By whom a plan says that it was made.
PLANNED = "loop"
AS_GIVEN = "loop-as-given"  # whole micro-batches in the caller's order, by 1F1B


@dataclass(frozen=True, slots=True)
class Freedom:
    """What a plan may do besides running micro-batches in the caller's order.

    reorder    run them in another order
    split      split backwards into I and W
    headroom   hold so much more than Megatron's 1F1B does, as a share of that; 0: no more
    had_rows   [stages] the most tokens that 1F1B has had to hold in calls until now; (): none
    price      so many times longer than predicted do planned orders take (track_record)
    memory     what chunks may hold, in bytes, and layers be recomputed for; None: as many tokens as
               by headroom, and nothing is recomputed
    """

    reorder: bool = True
    split: bool = True
    headroom: float = 0.0
    had_rows: tuple[int, ...] = ()
    price: float = 1.0
    memory: Memory | None = None

    def __post_init__(self) -> None:
        if not self.headroom >= 0:
            raise ValueError(f"headroom {self.headroom}: expected at least 0")

    def room(self, tokens: Sequence[int], stages: int) -> np.ndarray:
        """[stages]: tokens that may be held between forward and backward in a call with micro-
        batches of ``tokens``. A whole job so holds no more at once than it would by 1F1B."""
        now = rows_of_1f1b(tokens, stages)
        most = np.maximum(now, self.had_rows) if self.had_rows else now
        return most * (1 + self.headroom)

    def pays(self, seconds: float, given_seconds: float) -> bool:
        """Whether an order of ``seconds``, as predicted, is worth leaving the caller's for."""
        return seconds * self.price < given_seconds * (1 - GAIN)


def rows_of_1f1b(tokens: Sequence[int], stages: int) -> np.ndarray:
    """[stages]: the most tokens between forward and backward in the caller's order by Megatron's
    1F1B, which holds as many micro-batches in a row as stages follow, this one included."""
    ends = np.concatenate(([0], np.cumsum(tokens)))
    widths = [min(stages - stage, len(tokens)) for stage in range(stages)]
    return np.array([(ends[width:] - ends[:-width]).max() for width in widths])


def whole_plan(
    extents: Sequence[Extent],
    layers: Sequence[int],
    rates_SK3: np.ndarray,
    freedom: Freedom,
    forward_only: bool,
) -> Plan:
    """Every micro-batch a chunk of its own, in the order that takes least.

    rates_SK3   [stages, kinds, 3] by which seconds follow (stage_seconds)
    """
    if len(layers) == 1:
        orders = tuple(
            Op(kind, number)
            for number in range(len(extents))
            for kind in ((Kind.FORWARD,) if forward_only else (Kind.FORWARD, Kind.BACKWARD))
        )
        return uncut(extents, layers, (orders,), 0.0, AS_GIVEN)
    # Imported where plans are made: the compiler takes a second to load.
    from megatron_epp.planner.calls import ordering

    tokens, pairs = [e.tokens for e in extents], [e.pairs for e in extents]
    seconds = np.einsum("skf,fc->ksc", rates_SK3, features(tokens, pairs))
    if forward_only:
        order, takes, given = ordering.forward_orders(seconds[ordering.F], freedom.reorder)
        if freedom.pays(takes, given):
            return uncut(extents, layers, (order,) * len(layers), takes, PLANNED)
        order = tuple(Op(Kind.FORWARD, number) for number in range(len(extents)))
        return uncut(extents, layers, (order,) * len(layers), given, AS_GIVEN)
    work = ordering.Work(seconds, np.array(tokens), np.ones(len(tokens), dtype=np.int64))
    found = ordering.given_order(work)
    if freedom.memory is not None:
        return _within_memory(extents, layers, work, freedom, freedom.memory)
    if freedom.reorder or freedom.split:
        room = freedom.room(tokens, len(layers))
        ops = ordering.search_ops(found.seconds)
        tried = ordering.best_order(work, room, freedom.split, freedom.reorder, ops)
        if tried is not None and freedom.pays(tried.seconds, found.seconds):
            return uncut(extents, layers, tried.orders, tried.seconds, PLANNED)
    return uncut(extents, layers, found.orders, found.seconds, AS_GIVEN)


def _within_memory(
    extents: Sequence[Extent], layers: Sequence[int], work: Any, freedom: Freedom, memory: Memory
) -> Plan:
    """PlanError: nothing holds so little."""
    from megatron_epp.planner.calls import ordering, recompute

    count = len(extents)
    held = recompute.Held(
        memory, work.rows, np.zeros(count, dtype=bool), np.ones(count, dtype=bool), np.array(layers)
    )
    ops = ordering.search_ops(ordering.given_order(work).seconds)
    found = recompute.fitted(work, held, freedom.split, freedom.reorder, ops)
    if found is None:
        raise memory.too_little("whole micro-batches", max(e.tokens for e in extents))
    return uncut(extents, layers, found.orders, found.seconds, PLANNED, found.recompute)


def uncut(
    extents: Sequence[Extent],
    layers: Sequence[int],
    orders: tuple,
    seconds: float,
    by: str,
    recompute: tuple[tuple[str, ...], ...] = (),
) -> Plan:
    """Micro-batches as chunks, each a document of its own; () recomputes nothing."""
    tokens = tuple(extent.tokens for extent in extents)
    return Plan(
        documents=tokens,
        layers=tuple(layers),
        chunks=tuple(Chunk((Span(number, 0, count),)) for number, count in enumerate(tokens)),
        recompute=recompute or tuple((KEEP * count,) * len(tokens) for count in layers),
        orders=orders,
        predicted=Prediction(seconds, (0.0,) * len(layers), by),
    )
