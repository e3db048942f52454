"""Options of a call's plan: its freedom of order, the memory that it may hold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.planner.calls.call_cost import ActivationBudget

# By whom a plan says that it was made.
PLANNED = "loop"
AS_CALLED = "loop-as-given"  # whole micro-batches in the caller's order, by 1F1B
PAYS_FROM = 0.015  # at least so much faster than the caller's order, or it is not worth another
# What may be held, as multiples of what the fullest rank holds by Megatron's order.
BUDGET_FACTORS = (1.0, 1.125, 1.25, 1.5, 2.0, 3.0, 4.0)
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Choices that a plan has besides running micro-batches in the caller's order.

    reorder      run them in another order
    split        split backwards into I and W
    headroom     hold so much more than Megatron's 1F1B does, as a share of that; 0: no more
    token_bytes  [stages] bytes that a token holds on a stage, in proportion; (): alike on all
    had_bytes    the most that 1F1B has had to hold on a rank in calls until now, in such bytes
    correction   measured over predicted seconds of planned orders, against that of the caller's
                 (track_record)
    memory       bytes that chunks may hold, for which layers may be recomputed; None: as many
                 tokens as by headroom, and nothing is recomputed
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
        """Yield rising budgets [ranks] of what may be held between forward and backward.

        ``held`` [ranks] is what Megatron's order holds. Memory of all ranks is alike, so that every
        one may hold what the fullest does, in this call or an earlier one, and the headroom more.
        Budgets are multiples of what this call holds, whatever the headroom: a larger one leads to
        the same search, and further.
        """
        yield held
        most = max(float(held.max()), self.had_bytes) * (1 + self.headroom)
        for factor in BUDGET_FACTORS:
            if factor * held.max() <= most * (1 + _ROUNDING):
                yield np.full(len(held), factor * held.max())

    def pays(self, seconds: float, call_seconds: float) -> bool:
        """Whether an order of ``seconds``, as predicted, is worth leaving the caller's for."""
        return seconds * self.correction < call_seconds * (1 - PAYS_FROM)


def bytes_of_1f1b(
    tokens: Sequence[int], stages: int, token_bytes: Sequence[float] = ()
) -> np.ndarray:
    """[stages]: the most that is held between forward and backward in the caller's order by
    Megatron's 1F1B, as many micro-batches in a row as stages follow, this one included; in tokens,
    or in ``token_bytes`` of the stages."""
    ends = np.concatenate(([0], np.cumsum(tokens)))
    widths = [min(stages - stage, len(tokens)) for stage in range(stages)]
    most = [float((ends[width:] - ends[:-width]).max()) for width in widths]
    return np.array(most) * (token_bytes or (1.0,) * stages)
