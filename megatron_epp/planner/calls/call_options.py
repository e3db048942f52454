"""Options of a call's plan: allowed changes to the order, and memory limits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.planner.calls.call_cost import ActivationBudget

# Names of the planner that a plan's prediction records.
PLANNED = "loop"
AS_CALLED = "loop-as-given"  # unsliced micro-batches in the caller's order, by 1F1B
PAYS_FROM = 0.015  # least fraction of time that another order must save
# Memory budgets, as multiples of what the fullest rank holds in Megatron's order.
BUDGET_FACTORS = (1.0, 1.125, 1.25, 1.5, 2.0, 3.0, 4.0)
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Allowed changes to the caller's order, and memory limits.

    Attributes:
        reorder: whether micro-batches may run in another order.
        split: whether backwards may be split into I and W.
        token_bytes: relative bytes that each stage holds per token; () if all stages are equal.
        had_bytes: maximum that 1F1B held on any rank in earlier calls, in units of ``token_bytes``.
        cut: whether documents may be cut into slices.
        memory: budget in bytes; layers are recomputed until a plan fits. If None, the tokens that
            1F1B holds are the limit, and no layer is recomputed.
    """

    reorder: bool = True
    split: bool = True
    token_bytes: tuple[float, ...] = ()
    had_bytes: float = 0.0
    cut: bool = True
    memory: ActivationBudget | None = None

    def budgets(self, held: np.ndarray) -> Iterator[np.ndarray]:
        """Yield rising budgets [ranks] of the memory held between forward and backward.

        The first budget is ``held``. Every other budget is equal on all ranks, and a multiple of
        the maximum of ``held``. The limit is what 1F1B held on the fullest rank in this or an
        earlier call, because all ranks have equal memory.

        Args:
            held: [ranks] memory that Megatron's 1F1B holds in this call, in units of
                ``token_bytes``.
        """
        yield held
        most = max(float(held.max()), self.had_bytes)
        for factor in BUDGET_FACTORS:
            if factor * held.max() <= most * (1 + _ROUNDING):
                yield np.full(len(held), factor * held.max())

    def pays(self, seconds: float, call_seconds: float) -> bool:
        """Return whether an order of predicted ``seconds`` should replace the caller's order."""
        return seconds < call_seconds * (1 - PAYS_FROM)


def bytes_of_1f1b(
    tokens: Sequence[int], stages: int, token_bytes: Sequence[float] = ()
) -> np.ndarray:
    """Return the maximum memory [stages] of Megatron's 1F1B, which keeps the caller's order.

    Stage s of n stages holds at most n - s micro-batches. The result is the largest sum of n - s
    consecutive entries of ``tokens`` (one per micro-batch). It is in tokens, or in bytes if
    ``token_bytes`` [stages] is given.
    """
    ends = np.concatenate(([0], np.cumsum(tokens)))
    widths = [min(stages - stage, len(tokens)) for stage in range(stages)]
    most = [float((ends[width:] - ends[:-width]).max()) for width in widths]
    return np.array(most) * (token_bytes or (1.0,) * stages)
