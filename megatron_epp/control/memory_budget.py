"""Memory budget of each rank's device, corrected after peaks near the budget and after failures.

Three values are learned separately:

- The budget: after a rank has run out of memory, its budget is lowered.
- The correction: if a rank held c times the bytes that the plan predicted for chunks, the
  prediction of a later plan may be at most 1/c of the rank's budget for chunks.
- The routing: with experts on several devices, memory depends on the number of tokens per expert.
  If a rank holds more than predicted, a factor on the memory of the experts' tokens is raised
  first.

Every change is an event with its iteration, saved next to the checkpoint. A resumed run therefore
plans each iteration with the same budgets as before.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_epp.control.files import write_atomically
from megatron_epp.ir.errors import quoted
from megatron_epp.safe_files import bounded_text

BUDGET_FILE = "epp-budget.txt"
NEAR = 0.97  # fraction of the budget above which a wrong prediction matters
TOLERANCE = 1.01  # measured over corrected prediction; nothing is learned below it
SPARE = 0.95  # fraction of the bytes held when memory ran out
SHRINK = 0.9  # headroom left after the first failure of an iteration; then its square, and so on
ROUTING_STEP = 0.05  # granularity of the routing factor, as each change discards plans made ahead
LEAST_SHRINK = 0.5  # lower bound of a single cut, because no cut is ever undone

_EVENT = re.compile(
    r"iteration (\d{1,15}) pipeline rank (\d{1,15}) budget_bytes (\d{1,18}) "
    r"correction (\d{1,9}\.\d{6}) (?:routing (\d{1,9}\.\d{6}) )?(.+)"
)


def cut(tried: int) -> float:
    """Return the fraction of the headroom that remains after failure ``tried`` of an iteration.

    The fractions of failures 1, 2, 3 are 0.9, 0.81, 0.66, and then always 0.5. Each is relative to
    the headroom (the bytes available for chunks) before that failure.
    """
    return max(LEAST_SHRINK, SHRINK**2 ** (tried - 1))


@dataclass(frozen=True, slots=True)
class Event:
    """Change of a rank's memory budget, its correction or the routing factor, from an iteration on.

    Attributes:
        iteration: first iteration that the event applies to; if this iteration ran out of memory,
            the event applies to its repetition.
        rank: pipeline rank.
        budget_bytes: bytes that a device of ``rank`` may hold, model states included.
        correction: ratio of the bytes held for chunks to the predicted bytes.
        reason: text for the log and the file.
        routing: tokens of the most loaded device's experts, relative to an even distribution.
    """

    iteration: int
    rank: int
    budget_bytes: int
    correction: float
    reason: str
    routing: float = 1.0

    def __str__(self) -> str:
        return (
            f"iteration {self.iteration} pipeline rank {self.rank} budget_bytes "
            f"{self.budget_bytes} correction {self.correction:.6f} "
            f"{f'routing {self.routing:.6f} ' if self.routing != 1 else ''}{self.reason}"
        )

    @classmethod
    def parse(cls, line: str) -> "Event":
        """Parse the text of an event.

        Raises:
            ValueError: the line is not a budget event.
        """
        match = _EVENT.fullmatch(line)
        if match is None:
            raise ValueError(
                f"{quoted(line)} is not a budget event; expected "
                "'iteration N pipeline rank N budget_bytes N correction X.XXXXXX REASON'"
            )
        iteration, rank, budget_bytes = map(int, match.group(1, 2, 3))
        correction, routing = float(match[4]), float(match[5] or 1)
        return cls(iteration, rank, budget_bytes, correction, match[6], routing)


class MemoryBudget:
    """Memory budget of each pipeline rank's device, with the events that changed the budget.

    Args:
        device_bytes: budget of each pipeline rank, in bytes, model states included.
        states_bytes: bytes of weights, gradients and optimizer states of each rank; the rest of the
            budget is for chunks.
        most: upper bound of ``routing``: the expert-parallel size.

    Attributes:
        corrections: for each rank, ratio of the bytes held for chunks to the predicted bytes, at
            least 1.
        routing: tokens of the most loaded device's experts, relative to an even distribution.
        events: changes so far.
    """

    def __init__(
        self, device_bytes: Sequence[float], states_bytes: Sequence[float], most: float = 1.0
    ):
        self.device_bytes = tuple(map(float, device_bytes))
        self.states_bytes = tuple(map(float, states_bytes))
        self.corrections = (1.0,) * len(self.device_bytes)
        self.routing, self.most_routing = 1.0, most
        self.events: list[Event] = []
        self._recorded: list[Event] = []  # events of the resumed run that are still to come

    @property
    def planned_bytes(self) -> tuple[float, ...]:
        """Bytes that plans may predict for each pipeline rank, model states included."""
        return tuple(
            states + (budget - states) / correction
            for budget, states, correction in zip(
                self.device_bytes, self.states_bytes, self.corrections, strict=True
            )
        )

    def failed(
        self, iteration: int, rank: int, held_bytes: int, what: str, tried: int = 1
    ) -> Event:
        """Reduce the budget after an op ran out of memory, and return the event.

        The first failure of an iteration lowers the budget. A repeated failure shows that plans
        need more than the predicted bytes, and raises the correction. Each failure also shows the
        size of the memory: the budget for chunks becomes at most SPARE x ``held_bytes``.

        Args:
            iteration: number of the iteration that failed.
            rank: pipeline rank that failed.
            held_bytes: bytes held for chunks when the rank failed.
            what: op and reason, for the log.
            tried: number of failures of the iteration, including this failure.
        """
        states, correction = self.states_bytes[rank], self.corrections[rank]
        headroom = self.device_bytes[rank] - states
        if tried == 1:
            headroom *= cut(1)
        else:
            correction = _rounded(correction / cut(tried))
        less = math.floor(states + min(headroom, SPARE * held_bytes))
        return self._adopt(Event(iteration, rank, less, correction, f"out of memory at {what}"))

    def measured(
        self,
        iteration: int,
        predicted_bytes: Sequence[float],
        peak_bytes: Sequence[float],
        routed_bytes: Callable[[], Sequence[float]] = tuple,
    ) -> list[Event]:
        """Compare an iteration's peaks with its predictions, and return the resulting events.

        The events take effect in the next iteration. As long as events of a resumed run remain,
        this method applies those that are due, and makes no new events.

        Args:
            iteration: number of the iteration that ran.
            predicted_bytes: predicted peak of each rank, model states included.
            peak_bytes: measured peak of each rank, without model states.
            routed_bytes: function that returns, for each rank, the increase of the predicted peak
                in bytes if :attr:`routing` increases by 1. It is called only if a rank held more
                than predicted.
        """
        if self._recorded:
            due = [event for event in self._recorded if event.iteration <= iteration + 1]
            self._recorded = [event for event in self._recorded if event not in due]
            return [self._adopt(event) for event in due if self._tightens(event)]
        learnt = []
        routed: Sequence[float] = ()
        before = self.routing
        for rank, (prediction, peak) in enumerate(zip(predicted_bytes, peak_bytes, strict=True)):
            states, budget = self.states_bytes[rank], self.device_bytes[rank]
            predicted = prediction - states
            more = peak / self.corrections[rank] - predicted
            if before < self.most_routing and predicted > 0 and more > (TOLERANCE - 1) * predicted:
                routed = routed or routed_bytes()
                if routed[rank] > 0:
                    wanted = self._stepped(before + more / routed[rank])
                    predicted += (wanted - before) * routed[rank]
                    if wanted > self.routing:
                        learnt.append(self._routing_of(iteration + 1, rank, wanted))
            if predicted <= 0 or peak <= NEAR * (budget - states):
                continue
            if (error := peak / predicted) > TOLERANCE * self.corrections[rank]:
                reason = f"near miss: held {error:.3f} of what was predicted"
                event = Event(iteration + 1, rank, math.floor(budget), _rounded(error), reason)
                learnt.append(self._adopt(event))
        return learnt

    def _stepped(self, routing: float) -> float:
        """Round ``routing`` up to a multiple of ``ROUTING_STEP``, at most the upper bound."""
        return min(self.most_routing, _rounded(math.ceil(routing / ROUTING_STEP) * ROUTING_STEP))

    def _routing_of(self, iteration: int, rank: int, routing: float) -> Event:
        budget, correction = math.floor(self.device_bytes[rank]), self.corrections[rank]
        reason = f"experts of a device got up to {routing:.2f} times their even share of tokens"
        return self._adopt(Event(iteration, rank, budget, correction, reason, routing))

    def _tightens(self, event: Event) -> bool:
        return (
            event.routing > self.routing
            or event.budget_bytes < math.floor(self.device_bytes[event.rank])
            or event.correction > self.corrections[event.rank]
        )

    def _adopt(self, event: Event) -> Event:
        """Apply ``event`` so that budgets never grow and factors never shrink; return it."""
        at = event.rank
        if event.budget_bytes < math.floor(self.device_bytes[at]):
            self.device_bytes = _with(self.device_bytes, at, float(event.budget_bytes))
        self.corrections = _with(self.corrections, at, max(self.corrections[at], event.correction))
        self.routing = max(self.routing, min(event.routing, self.most_routing))
        self.events.append(event)
        return event

    # -------------------------------------------------------------- saved

    def save(self, folder: str) -> None:
        """Write all events to the budget file in ``folder``."""
        events = map(str, (*self.events, *self._recorded))
        lines = (f"pipeline ranks {len(self.device_bytes)}", *events)
        write_atomically(Path(folder) / BUDGET_FILE, "".join(f"{line}\n" for line in lines))

    def load(self, folder: str, iteration: int) -> None:
        """Read a resumed run's events from ``folder``, and apply those that are due.

        ``iteration`` is the last iteration that the checkpoint contains. Events of iterations up to
        ``iteration`` + 1, the next one to run, are due; :meth:`measured` applies each later event
        before the event's iteration. If ``folder`` has no budget file, or the file is for another
        number of pipeline ranks, nothing changes.

        Raises:
            ValueError: the file cannot be parsed.
            OSError: the file cannot be read.
        """
        path = Path(folder) / BUDGET_FILE
        if not path.exists():
            return
        text = bounded_text(path, "what training learnt about memory", "replace")
        head, *lines = text.splitlines() or [""]
        if head != f"pipeline ranks {len(self.device_bytes)}":
            return  # the number of pipeline ranks differs, so the events do not apply
        for number, line in enumerate(lines, 2):
            try:
                event = Event.parse(line)
                if event.rank >= len(self.device_bytes):
                    raise ValueError(f"there is no pipeline rank {event.rank}")
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number}: {error}; delete the file: what training learnt about "
                    "memory is then learnt again"
                ) from error
            if event.iteration <= iteration + 1:
                self._adopt(event)
            else:
                self._recorded.append(event)


def _rounded(factor: float) -> float:
    """Round up to the six decimals of the file, so that a resumed run plans with the same value."""
    return math.ceil(factor * 1e6) / 1e6


def _with(values: tuple[float, ...], place: int, value: float) -> tuple[float, ...]:
    return (*values[:place], value, *values[place + 1 :])
