"""Correction of a planned order's predicted gain, from measured times of calls.

    correction = ratio of planned orders / ratio of the caller's order
    ratio      = measured / predicted seconds

Predictions omit the time between ops, and other processes may slow the machine down. A slowdown of
both planned orders and the caller's order cancels out. A planned order runs only if its predicted
seconds, times the correction, are less than 1 - PAYS_FROM of those of the caller's order. After
many calls with a planned order, the caller's order is tried again, and vice versa.
"""

from collections import deque
from statistics import median

RECENT_CALLS = 5  # number of calls of each kind that count
RETRY = 16  # calls in the caller's order after which a planned order is tried again
CHECK = 32  # calls in planned orders after which the caller's order is measured again
MOST = 2.0
# the correction is rounded to this step, because it is a key of cached plans
CORRECTION_STEP = 0.02


class TrackRecord:
    """Predicted and measured seconds of one pipeline's calls; identical on all its ranks."""

    def __init__(self) -> None:
        self._planned: deque[float] = deque(maxlen=RECENT_CALLS)
        self._called: deque[float] = deque(maxlen=RECENT_CALLS)
        self._in_turn = 0
        self._planned_in_turn = 0

    def saw(self, planned: bool, predicted_seconds: float, measured_seconds: float) -> None:
        """Add the times of one call.

        Args:
            planned: whether the call's order differed from the caller's 1F1B.
            predicted_seconds: predicted time of the call.
            measured_seconds: measured time of the call.
        """
        if not (predicted_seconds > 0 and measured_seconds > 0):
            return
        (self._planned if planned else self._called).append(measured_seconds / predicted_seconds)
        self._in_turn = 0 if planned else self._in_turn + 1
        self._planned_in_turn = self._planned_in_turn + 1 if planned else 0
        if self._in_turn >= RETRY:
            self._planned.clear()
            self._in_turn = 0

    @property
    def due(self) -> bool:
        """Whether a call should run in the caller's order, to measure its time again."""
        return self._planned_in_turn >= CHECK

    @property
    def correction(self) -> float:
        """Factor (1 to ``MOST``, in steps) on the predicted seconds of a planned order.

        Until a call in the caller's order is measured, that order's predictions count as exact.
        """
        if not self._planned:
            return 1.0
        baseline = median(self._called) if self._called else 1.0
        ratio = min(MOST, max(1.0, median(self._planned) / baseline))
        return round(round(ratio / CORRECTION_STEP) * CORRECTION_STEP, 6)
