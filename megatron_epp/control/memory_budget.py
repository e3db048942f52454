"""What each stage may hold, and what training learnt about it: near misses, and real failures.

A stage that came near its budget and held more than was predicted gets a margin; one that ran out
of memory gets less than it held. Every change is an event with its iteration, kept beside the
checkpoint: on resume, plans are made with the budgets that they were made with before, each from
its iteration on.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FILE_NAME = "epp-budget.txt"
NEAR = 0.97  # of what a stage may hold: above it a wrong prediction matters
TOLERANCE = 1.01  # measured over predicted; below it nothing is learnt
SHRINK = 0.9  # after a failure, at the least
SPARE = 0.95  # of what was held when memory ran out

_EVENT = re.compile(r"iteration (\d+) stage (\d+) budget_bytes (\d+) (.+)")


@dataclass(frozen=True, slots=True)
class Event:
    """From ``iteration`` on (its repetition included) stage ``stage`` may hold ``budget_bytes``."""

    iteration: int
    stage: int
    budget_bytes: int
    reason: str

    def __str__(self) -> str:
        return (
            f"iteration {self.iteration} stage {self.stage} budget_bytes {self.budget_bytes} "
            f"{self.reason}"
        )

    @classmethod
    def parse(cls, line: str) -> "Event":
        match = _EVENT.fullmatch(line)
        if match is None:
            raise ValueError(
                f"{line[:60]!r} is no budget event; expected "
                "'iteration N stage N budget_bytes N REASON'"
            )
        return cls(int(match[1]), int(match[2]), int(match[3]), match[4])


class Budget:
    """``stage_bytes``: what plans may use of every stage's device, states included.

    states_bytes   of every stage: weights, gradients, optimizer; what else is held is for chunks
    """

    def __init__(self, stage_bytes: Sequence[float], states_bytes: Sequence[float]):
        self.stage_bytes = tuple(map(float, stage_bytes))
        self.states_bytes = tuple(map(float, states_bytes))
        self.events: list[Event] = []
        self._recorded: list[Event] = []  # of the run that is resumed, still to come

    def _adopt(self, event: Event) -> Event:
        bytes_ = list(self.stage_bytes)
        bytes_[event.stage] = float(event.budget_bytes)
        self.stage_bytes = tuple(bytes_)
        self.events.append(event)
        return event

    def failed(self, iteration: int, stage: int, held_bytes: int, what: str) -> Event:
        """``held_bytes`` for chunks were too much; ``what``: op and reason."""
        states = self.states_bytes[stage]
        room = self.stage_bytes[stage] - states
        less = min(SHRINK * room, SPARE * held_bytes)
        return self._adopt(
            Event(iteration, stage, math.floor(states + less), f"out of memory at {what}")
        )

    def measured(
        self, iteration: int, predicted_bytes: Sequence[float], peak_bytes: Sequence[float]
    ) -> list[Event]:
        """What the iteration's peaks (for chunks) say of the promised ones (states included).

        Learnt from the next iteration on. While there are events of the run that is resumed, those
        are what was learnt.
        """
        if self._recorded:
            due = [event for event in self._recorded if event.iteration <= iteration + 1]
            self._recorded = [event for event in self._recorded if event not in due]
            lower = (event for event in due if event.budget_bytes < self.stage_bytes[event.stage])
            return [self._adopt(event) for event in lower]
        learnt = []
        for stage, (promise, peak) in enumerate(zip(predicted_bytes, peak_bytes, strict=True)):
            states = self.states_bytes[stage]
            room, promised = self.stage_bytes[stage] - states, promise - states
            if promised > 0 and peak > NEAR * room and peak > TOLERANCE * promised:
                less = math.floor(states + room * promised / (TOLERANCE * peak))
                reason = f"near miss: held {peak / promised:.3f} of what was predicted"
                learnt.append(self._adopt(Event(iteration + 1, stage, less, reason)))
        return learnt

    # -------------------------------------------------------------- kept

    def save(self, folder: str):
        lines = (f"stages {len(self.stage_bytes)}", *self.events, *self._recorded)
        text = "".join(f"{line}\n" for line in lines)
        (Path(folder) / FILE_NAME).write_text(text, encoding="utf-8")

    def load(self, folder: str, iteration: int):
        """Adopt the events of a run that is resumed behind ``iteration``; later ones when it is
        their turn."""
        path = Path(folder) / FILE_NAME
        if not path.exists():
            return
        head, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
        if head != f"stages {len(self.stage_bytes)}":
            return  # another number of stages: nothing of this holds any more
        for number, line in enumerate(lines, 2):
            try:
                event = Event.parse(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if event.iteration <= iteration + 1:
                self._adopt(event)
            else:
                self._recorded.append(event)
