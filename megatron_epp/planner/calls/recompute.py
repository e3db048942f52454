"""Number of layers that each stage recomputes per chunk, so that a call fits a budget of bytes.

InfiniPipe's diagonal program computes the least recompute for a given order, but the search for
orders needs the recompute first. The search therefore runs once for each of these choices: none,
the recompute that 1F1B requires, the recompute that one micro-batch at a time requires, half of all
layers, and all layers. Recompute that the resulting order does not require is then removed.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import FULL
from megatron_epp.planner.calls.call_cost import ActivationBudget, CallChunks, byte_table, chunks_in
from megatron_epp.planner.calls.group_order import OrderedGroups, best_order, problem_of_call
from megatron_epp.planner.order.compiled import B, F
from megatron_epp.planner.order.problem import ScheduleProblem
from megatron_epp.planner.order.replay import replayed
from megatron_epp.planner.order.warmup import group_by_group, shrinking_in_flight
from megatron_epp.planner.recompute.choices import diagonal_counts
from megatron_epp.planner.recompute.ilp import Solver

RECOMPUTED_FRACTIONS = (0.5, 1.0)  # of all layers


class RecomputeFit:
    """Search for the order and the recompute of one call; a layer is saved or fully recomputed.

    Args:
        call: the chunks.
        rates_SK3: [stages, op kinds, 3] seconds per token, query-key pair and op.
        layers: number of layers of every stage.
        budget: bytes that chunks may hold between forward and backward.
    """

    def __init__(
        self,
        call: CallChunks,
        rates_SK3: np.ndarray,
        layers: tuple[int, ...],
        budget: ActivationBudget,
    ):
        self.call, self.rates_SK3 = call, rates_SK3
        self.cost: Cost = budget.cost(layers)
        self.solver = Solver()

    def best(self, split: bool, reorder: bool, ops: int) -> tuple[OrderedGroups, np.ndarray] | None:
        """Return the fastest order within the budget, or None if none fits.

        Args:
            split: whether backwards may be split into I and W if no layer is recomputed.
            reorder: whether groups may run in another order than the caller's.
            ops: number of ops that the search may simulate.

        Returns:
            The order, and the number [stages, chunks] of recomputed layers.
        """
        choices = list(self._choices())
        best = None
        for again in choices:
            some = bool(again.any())
            problem = self._problem(self.call, again)
            ordered = best_order(
                problem, self.call.sizes, split and not some, reorder, ops // len(choices)
            )
            if ordered is None:
                continue
            if some:
                ordered, again = self._without_needless(ordered, again)
            if best is None or ordered.seconds < best[0].seconds:
                best = ordered, again
        return best

    def _choices(self) -> Iterator[np.ndarray]:
        nothing = np.zeros((self.cost.layout.stages, len(self.call.loads.tokens)))
        yield nothing
        kept = self._problem(self.call, nothing)
        for limit in (shrinking_in_flight, group_by_group):
            again = self._least(self.call, kept, limit(self.call.sizes, self.cost.layout.stages))
            if again is not None and again.any():
                yield again
        for fraction in RECOMPUTED_FRACTIONS:
            yield nothing + np.ceil(fraction * np.array(self.cost.layout.layers))[:, None]

    def _without_needless(
        self, ordered: OrderedGroups, again: np.ndarray
    ) -> tuple[OrderedGroups, np.ndarray]:
        """Return the order with only the recompute that it requires, unless this is slower."""
        call, kinds = self.call.arranged(ordered.order), ordered.schedule.kinds
        before = np.cumsum(kinds == F, axis=1)[kinds == B].reshape(self.cost.layout.stages, -1)
        kept = self._problem(call, np.zeros_like(again))
        less = self._least(call, kept, before)
        if less is None:
            return ordered, again
        problem = self._problem(call, less)
        played = replayed(problem, ordered.schedule)
        if played.over_bytes > 0 or played.seconds > ordered.seconds:
            return ordered, again
        again = np.empty_like(less)
        again[:, chunks_in(ordered.order, self.call.sizes)] = less
        return dataclasses.replace(ordered, problem=problem, schedule=played), again

    def _problem(self, call: CallChunks, again: np.ndarray) -> ScheduleProblem:
        table = byte_table(call, self.rates_SK3, self.cost, again)
        return problem_of_call(call, table, np.array(self.cost.device_budget_bytes))

    def _least(
        self, call: CallChunks, kept: ScheduleProblem, limit: np.ndarray
    ) -> np.ndarray | None:
        """Return the least number [stages, chunks] of layers to recompute for an in-flight limit.

        Return None if the chunks do not fit even with all layers recomputed.
        """
        counts = diagonal_counts(self.solver, self.cost, call.loads, kept, limit, integer=False)
        return (
            None if counts is None else counts.get((0, FULL), np.zeros(kept.ops.seconds.shape[1:]))
        )
