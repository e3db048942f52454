"""Detection of long waits for plans, with advice to the user."""

from collections import deque
from dataclasses import dataclass, field

from megatron_epp.control.step_source import Planning

WATCHED = 20  # number of iterations that count
MOST = 0.02  # fraction of their time above which a wait is reported


@dataclass
class Waits:
    """Detector of long waits for plans; it reports each period of long waits once.

    The first iteration does not count, because no plan can be made ahead of it.

    Attributes:
        seen: number of iterations so far.
    """

    seen: int = 0
    _warned: bool = False
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WATCHED))

    def see(self, planning: Planning, seconds: float) -> list[str]:
        """Record an iteration, and return warnings about waits for plans.

        Args:
            planning: record of the iteration's planning, with the time that training waited.
            seconds: time of the iteration in seconds, without the wait.
        """
        self.seen += 1
        waited = planning.waited_seconds
        if self.seen == 1:
            return []
        self._recent.append((waited, waited + seconds))
        lost, total = map(sum, zip(*self._recent, strict=True))
        before, self._warned = self._warned, len(self._recent) == WATCHED and lost > MOST * total
        if before or not self._warned:
            return []
        remedy = (
            "give --epp-plan-cores more cores, or --epp-effort less"
            if planning.ahead
            else "leave --no-epp-plan-ahead out"
        )
        return [
            f"training waited for its plans {lost / total:.0%} of the last {WATCHED} iterations: "
            f"{remedy}"
        ]
