"""Whether calls by planned orders take as long as was predicted: else the caller's order is run.

    correction = (measured / predicted, in planned orders) / (measured / predicted, in the caller's)

A prediction leaves out what happens between ops, and a machine may be busy with other things. What
slows both kinds of calls down alike cancels. A planned order must gain so much more by prediction.
Neither kind is given up for good: after many calls of the one, the other is run once more.
"""

from collections import deque
from statistics import median

RECENT_CALLS = 5  # of each kind that count
RETRY = 16  # calls in the caller's order, behind which a planned one is tried again
CHECK = 32  # calls in planned orders, behind which the caller's is measured again
MOST = 2.0
CORRECTION_STEP = 0.02  # in which a correction is told: plans are remembered by it


class TrackRecord:
    """Predicted and measured seconds of one pipeline's calls; all its ranks are told the same."""

    def __init__(self) -> None:
        self._planned: deque[float] = deque(maxlen=RECENT_CALLS)
        self._called: deque[float] = deque(maxlen=RECENT_CALLS)
        self._in_turn = 0
        self._planned_in_turn = 0

    def saw(self, planned: bool, predicted_seconds: float, measured_seconds: float) -> None:
        """A call is over; ``planned``: its order was not the caller's by 1F1B."""
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
        """Whether a call should run in the caller's order, to see what that takes by now."""
        return self._planned_in_turn >= CHECK

    @property
    def correction(self) -> float:
        """Factor of a planned order's predicted seconds: 1 to ``MOST``, in steps. Until
        the caller's order has been measured its prediction is believed."""
        if not self._planned:
            return 1.0
        baseline = median(self._called) if self._called else 1.0
        ratio = min(MOST, max(1.0, median(self._planned) / baseline))
        return round(round(ratio / CORRECTION_STEP) * CORRECTION_STEP, 6)
