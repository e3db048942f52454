"""Options of a call's plan: freedom of order, and memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.planner.calls.call_cost import ActivationBudget

# Names of a plan's planner.
PLANNED = "loop"
AS_CALLED = "loop-as-given"  # unsliced micro-batches in the caller's order, by 1F1B
PAYS_FROM = 0.015  # least fraction of time that another order must save
# Memory budgets, as multiples of what the fullest rank holds in Megatron's order.
BUDGET_FACTORS = (1.0, 1.125, 1.25, 1.5, 2.0, 3.0, 4.0)
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a plan may change about the caller's order.

    Attributes:
        reorder: whether micro-batches may run in another order.
        split: whether backwards may be split into I and W.
        headroom: memory above Megatron's 1F1B, as a fraction.
        token_bytes: [stages] relative bytes per token; () if all stages are alike.
        had_bytes: most that 1F1B had to hold on a rank in earlier calls, in these bytes.
        correction: measured over predicted seconds of planned orders, relative to that of the
            caller's order (track_record).
        memory: bytes that chunks may hold, with recompute as needed. None: tokens by ``headroom``,
            without recompute.
    """

    reorder: bool = True
    split: bool = True
    headroom: float = 0.0
    token_bytes: tuple[float, ...] = ()
    had_bytes: float = 0.0
    correction: float = 1.0
    memory: ActivationBudget | None = None

    def __post_init__(self) -> None:
        if not self.headroom >= 0:
            raise ValueError(f"headroom {self.headroom}: expected at least 0")

    def budgets(self, held: np.ndarray) -> Iterator[np.ndarray]:
        """Yield rising memory budgets [ranks] between forward and backward.

        All ranks have equal memory, so each may hold what the fullest rank does in this call or an
        earlier one, plus the headroom. Budgets are fixed multiples of what this call holds: a
        larger headroom then extends the same search.

        Args:
            held: [ranks] what Megatron's order holds.
        """
        yield held
        most = max(float(held.max()), self.had_bytes) * (1 + self.headroom)
        for factor in BUDGET_FACTORS:
            if factor * held.max() <= most * (1 + _ROUNDING):
                yield np.full(len(held), factor * held.max())

    def pays(self, seconds: float, call_seconds: float) -> bool:
        """Return whether predicted ``seconds`` of an order justify leaving the caller's order."""
        return seconds * self.correction < call_seconds * (1 - PAYS_FROM)


def bytes_of_1f1b(
    tokens: Sequence[int], stages: int, token_bytes: Sequence[float] = ()
) -> np.ndarray:
    """Return [stages] the most that Megatron's 1F1B holds in the caller's order.

    It is the largest sum of as many consecutive micro-batches as stages follow, including this one:
    in tokens, or in ``token_bytes`` of the stages.
    """
    ends = np.concatenate(([0], np.cumsum(tokens)))
    widths = [min(stages - stage, len(tokens)) for stage in range(stages)]
    most = [float((ends[width:] - ends[:-width]).max()) for width in widths]
    return np.array(most) * (token_bytes or (1.0,) * stages)
