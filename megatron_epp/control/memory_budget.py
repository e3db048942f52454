"""Memory that each rank's device may hold, corrected by near misses and failures in training.

Two things can be wrong, and each is learnt as what it is. The budget: a rank that ran out of
memory may hold less than was thought. The prediction: a rank that held more than was predicted is
planned for as much less, by a factor that is compared with what *plans* predict, so a steady error
is learnt once and not again every iteration. Where devices share experts, what they hold depends on
how many tokens choose theirs: what was held beyond the prediction is put down to that first, as a
factor on that part of the memory alone, and at once, for it may come back where memory is short.
Every change is an event with its iteration, kept
beside the checkpoint: on resume, plans are made with the budgets that they were made with before,
each from its iteration on.
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
NEAR = 0.97  # of what a device may hold: above it a wrong prediction matters
TOLERANCE = 1.01  # measured over corrected prediction; below it nothing is learnt
SPARE = 0.95  # of what was held when memory ran out
SHRINK = 0.9  # after the first failure of an iteration, at the least; then its square, ...
ROUTING_STEP = 0.05  # in which the factor of experts grows: each time plans are made anew
LEAST_SHRINK = 0.5  # ... but never by more than this at once: what is cut is not given back

_EVENT = re.compile(
    r"iteration (\d{1,15}) stage (\d{1,15}) budget_bytes (\d{1,18}) correction (\d{1,9}\.\d{6}) "
    r"(?:routing (\d{1,9}\.\d{6}) )?(.+)"
)


def cut(tried: int) -> float:
    """Fraction of the headroom that is left when an iteration has failed for the ``tried``-th time:
    0.9, 0.81 of that, 0.66 of that, and then a half each time."""
    return max(LEAST_SHRINK, SHRINK**2 ** (tried - 1))


@dataclass(frozen=True, slots=True)
class Event:
    """From ``iteration`` on (its repetition included) a device of pipeline rank ``rank`` may hold
    ``budget_bytes``, and holds ``correction`` times what is predicted for its chunks; experts of
    the fullest device get ``routing`` times an even share of tokens."""

    iteration: int
    rank: int
    budget_bytes: int
    correction: float
    reason: str
    routing: float = 1.0

    def __str__(self) -> str:
        return self._text("pipeline rank")

    @property
    def line(self) -> str:
        """The line of the file, which calls a pipeline rank a stage."""
        return self._text("stage")

    def _text(self, rank: str) -> str:
        return (
            f"iteration {self.iteration} {rank} {self.rank} budget_bytes {self.budget_bytes} "
            f"correction {self.correction:.6f} "
            f"{f'routing {self.routing:.6f} ' if self.routing != 1 else ''}{self.reason}"
        )

    @classmethod
    def parse(cls, line: str) -> "Event":
        """Parse a :attr:`line` of the file."""
        match = _EVENT.fullmatch(line)
        if match is None:
            raise ValueError(
                f"{quoted(line)} is no budget event; expected "
                "'iteration N stage N budget_bytes N correction X.XXXXXX REASON'"
            )
        iteration, rank, budget_bytes = map(int, match.group(1, 2, 3))
        correction, routing = float(match[4]), float(match[5] or 1)
        return cls(iteration, rank, budget_bytes, correction, match[6], routing)


class MemoryBudget:
    """``device_bytes``: what a device of every pipeline rank may hold, states included.

    states_bytes   of every rank: weights, gradients, optimizer; what else is held is for chunks
    corrections    of every rank: bytes held for chunks over those predicted, at least 1
    routing        tokens of the fullest device's experts over an even share, at most ``most``:
                   the devices that share them
    """

    def __init__(
        self, device_bytes: Sequence[float], states_bytes: Sequence[float], most: float = 1.0
    ):
        self.device_bytes = tuple(map(float, device_bytes))
        self.states_bytes = tuple(map(float, states_bytes))
        self.corrections = (1.0,) * len(self.device_bytes)
        self.routing, self.most_routing = 1.0, most
        self.events: list[Event] = []
        self._recorded: list[Event] = []  # of the run that is resumed, still to come

    @property
    def planned_bytes(self) -> tuple[float, ...]:
        """Bytes that plans may predict for every pipeline rank, states included."""
        return tuple(
            states + (budget - states) / correction
            for budget, states, correction in zip(
                self.device_bytes, self.states_bytes, self.corrections, strict=True
            )
        )

    def failed(
        self, iteration: int, rank: int, held_bytes: int, what: str, tried: int = 1
    ) -> Event:
        """``held_bytes`` for chunks were too much; ``what``: op and reason; ``tried``: how many
        times the iteration has failed.

        A first failure says how much there is. That it was followed by another one says that plans
        need more than they predict.
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
        """Events that follow from the iteration's peaks (for chunks), measured against the
        predicted ones (states included).

        ``routed_bytes()``: by how much each rank's would grow if the fullest device's experts got
        one even share more; asked for only where more was held than predicted.

        Learnt from the next iteration on. While there are events of the run that is resumed, those
        are what was learnt.
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
        """The next step above, or the most that is possible."""
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
        """Apply ``event``. A budget is only lowered, a factor only raised."""
        at = event.rank
        if event.budget_bytes < math.floor(self.device_bytes[at]):
            self.device_bytes = _with(self.device_bytes, at, float(event.budget_bytes))
        self.corrections = _with(self.corrections, at, max(self.corrections[at], event.correction))
        self.routing = max(self.routing, min(event.routing, self.most_routing))
        self.events.append(event)
        return event

    # -------------------------------------------------------------- kept

    def save(self, folder: str) -> None:
        events = (event.line for event in (*self.events, *self._recorded))
        lines = (f"stages {len(self.device_bytes)}", *events)
        write_atomically(Path(folder) / BUDGET_FILE, "".join(f"{line}\n" for line in lines))

    def load(self, folder: str, iteration: int) -> None:
        """Adopt the events of a run that is resumed behind ``iteration``; later ones when it is
        their turn. ValueError: a file that cannot be read."""
        path = Path(folder) / BUDGET_FILE
        if not path.exists():
            return
        text = bounded_text(path, "what training learnt about memory", "replace")
        head, *lines = text.splitlines() or [""]
        if head != f"stages {len(self.device_bytes)}":
            return  # another number of pipeline ranks: nothing of this holds any more
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
    """As the file keeps it, and not below: a resumed run must plan with the same."""
    return math.ceil(factor * 1e6) / 1e6


def _with(values: tuple[float, ...], place: int, value: float) -> tuple[float, ...]:
    return (*values[:place], value, *values[place + 1 :])
