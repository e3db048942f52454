"""How long training waits for its plans, and what to do when that is long."""

from collections import deque
from dataclasses import dataclass, field

from megatron_epp.control.step_source import Planning

WATCHED = 20  # iterations
MOST = 0.02  # of their time may be spent waiting


@dataclass
class Waits:
    """Fed with every iteration; says once what to do, until it is over.

    The first iteration, for which nothing can be planned ahead, does not count.

    seen   iterations so far
    """

    seen: int = 0
    _warned: bool = False
    _recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WATCHED))

    def see(self, planning: Planning, seconds: float) -> list[str]:
        """Return warnings about the iteration, which took ``seconds`` besides its wait."""
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
