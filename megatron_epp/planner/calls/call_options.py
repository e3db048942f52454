"""Options of a call's plan: its freedom of order, the memory that it may hold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.planner.calls.call_cost import ActivationBudget

# By whom a plan says that it was made.
PLANNED = "loop"
AS_CALLED = "loop-as-given"  # whole micro-batches in the caller's order, by 1F1B
PAYS_FROM = 0.015  # at least so much faster than the caller's order, or it is not worth another


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Choices that a plan has besides running micro-batches in the caller's order.

    reorder      run them in another order
    split        split backwards into I and W
    headroom     hold so much more than Megatron's 1F1B does, as a share of that; 0: no more
    had_rows     [stages] the most tokens that 1F1B has had to hold in calls until now; (): none
    correction   measured over predicted seconds of planned orders, against that of the caller's
                 (track_record)
    memory       bytes that chunks may hold, for which layers may be recomputed; None: as many
                 tokens as by headroom, and nothing is recomputed
    """

    reorder: bool = True
    split: bool = True
    headroom: float = 0.0
    had_rows: tuple[int, ...] = ()
    correction: float = 1.0
    memory: ActivationBudget | None = None

    def __post_init__(self) -> None:
        if not self.headroom >= 0:
            raise ValueError(f"headroom {self.headroom}: expected at least 0")

    def memory_of_call(self, tokens: Sequence[int], stages: int) -> np.ndarray:
        """[stages]: tokens that may be held between forward and backward in a call with micro-
        batches of ``tokens``. A whole job so holds no more at once than it would by 1F1B."""
        now = rows_of_1f1b(tokens, stages)
        most = np.maximum(now, self.had_rows) if self.had_rows else now
        return most * (1 + self.headroom)

    def pays(self, seconds: float, call_seconds: float) -> bool:
        """Whether an order of ``seconds``, as predicted, is worth leaving the caller's for."""
        return seconds * self.correction < call_seconds * (1 - PAYS_FROM)


def rows_of_1f1b(tokens: Sequence[int], stages: int) -> np.ndarray:
    """[stages]: the most tokens between forward and backward in the caller's order by Megatron's
    1F1B, which holds as many micro-batches in a row as stages follow, this one included."""
    ends = np.concatenate(([0], np.cumsum(tokens)))
    widths = [min(stages - stage, len(tokens)) for stage in range(stages)]
    return np.array([(ends[width:] - ends[:-width]).max() for width in widths])
