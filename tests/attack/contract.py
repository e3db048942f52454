"""An attack, and its outcome."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class GaveWay(Exception):
    """The package did not do what it owes; the text says what it did."""


class Skipped(Exception):
    """This host cannot be attacked so; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Attack:
    """``run`` gets an empty folder of its own and returns what happened, in words.

    It raises :class:`GaveWay` or :class:`Skipped`. ``several``: it is many small attacks at once,
    and yields (name, what gave way) of those that failed.
    """

    part: str
    name: str
    expected: str
    run: Callable[[Path], str]


@dataclass(frozen=True, slots=True)
class Outcome:
    attack: Attack
    happened: str
    seconds: float
    verdict: str  # pass, FAIL, skipped

    @property
    def failed(self) -> bool:
        return self.verdict == "FAIL"


def attempt(attack: Attack, folder: Path) -> Outcome:
    """Run one attack; whatever goes wrong in it is an outcome, too."""
    started = time.monotonic()
    folder.mkdir(parents=True)
    try:
        happened, verdict = attack.run(folder), "pass"
    except Skipped as reason:
        happened, verdict = str(reason), "skipped"
    except GaveWay as reason:
        happened, verdict = str(reason), "FAIL"
    except Exception as error:  # an attack that breaks has shown nothing
        happened, verdict = f"the attack itself broke: {type(error).__name__}: {error}", "FAIL"
    return Outcome(attack, happened, time.monotonic() - started, verdict)


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise GaveWay(otherwise)
