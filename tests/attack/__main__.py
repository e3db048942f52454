"""Attacks the package as a careless user, a failing machine and an adversary would.

    .venv/bin/python -m tests.attack                     everything
    .venv/bin/python -m tests.attack --part lines        one part; --list shows all attacks

Run on demand, from the project's folder; pytest tries a few of them (test_attack.py). Everything
happens in temporary folders, bounded in memory and time. Exit status 0: all held; 1: something gave
way, or there was no time to try it.
"""

import argparse
import os
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path

from tests.attack import damaged_files, lines, soak, training
from tests.attack.command_server import CommandServer
from tests.attack.contract import Attack, Outcome, attempt
from tests.attack.material import Material

PARTS = ("lines", "files", "training", "soak")
# Nothing in these is timed, and most of it needs one core: two attacks at a time.
SIDE_BY_SIDE = ("lines", "files")
_WIDTHS = (9, 46, 44, 9)


@dataclass
class Grounds:
    """Set-up of all attacks, made when the first one asks for it. Leaving the context ends it."""

    folder: Path
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "Grounds":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @cached_property
    def server(self) -> CommandServer:
        return self._open.enter_context(CommandServer())

    @cached_property
    def torch_server(self) -> CommandServer:
        return self._open.enter_context(CommandServer(torch=True))

    @cached_property
    def material(self) -> Material:
        return Material(self.folder / "material", self.server)


def attacks(grounds: Grounds, parts: list[str], iterations: int) -> Iterator[Attack]:
    # Those that take longest go first.
    if "lines" in parts:
        yield from lines.training_attacks(grounds.torch_server, grounds.folder / "flags")
    if "lines" in parts:
        yield from lines.attacks(grounds.server, grounds.material)
    if "files" in parts:
        yield from damaged_files.attacks(grounds.server, grounds.material)
    if "training" in parts:
        yield from training.attacks(grounds.folder / "undisturbed")
    if "soak" in parts:
        yield from soak.attacks(iterations)


def main() -> int:
    chosen = _read()
    ends = time.monotonic() + 60 * chosen.minutes
    folder = Path(tempfile.mkdtemp(prefix="attack-"))
    outcomes: list[Outcome] = []
    untried = 0
    try:
        with Grounds(folder) as grounds:
            listed = attacks(grounds, chosen.part, chosen.iterations)
            wanted = [
                attack
                for attack in listed
                if not chosen.only or any(word in attack.name for word in chosen.only)
            ]
            if chosen.list:
                for attack in wanted:
                    print(_row(attack.part, attack.name, attack.expected, ""))
                return 0
            for outcome in _attempted(wanted, folder, ends):
                if outcome is None:
                    untried += 1
                else:
                    outcomes.append(outcome)
                    _show(outcome)
    finally:
        if not chosen.keep:
            shutil.rmtree(folder, ignore_errors=True)
    failed = sum(outcome.failed for outcome in outcomes)
    skipped = sum(outcome.verdict == "skipped" for outcome in outcomes)
    held = len(outcomes) - failed - skipped
    print(
        f"{held} held, {failed} gave way, {skipped} skipped, {untried} not tried for lack of time"
    )
    return 1 if failed or untried else 0


def _attempted(wanted: list[Attack], folder: Path, ends: float) -> Iterator[Outcome | None]:
    """Outcomes of all attacks, in the order in which they ended; None: it was not begun before
    ``ends``, a reading of the monotonic clock."""

    def one(numbered: tuple[int, Attack]) -> Outcome | None:
        number, attack = numbered
        return None if time.monotonic() > ends else attempt(attack, folder / f"{number:03d}")

    numbered = enumerate(wanted)
    for beside, group in groupby(numbered, lambda each: each[1].part in SIDE_BY_SIDE):
        with ThreadPoolExecutor(2 if beside else 1) as pool:
            for future in as_completed([pool.submit(one, each) for each in group]):
                yield future.result()


def _row(*cells: str) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    return "  ".join(padded).rstrip()


def _show(outcome: Outcome) -> None:
    attack, (first, *more) = outcome.attack, outcome.happened.splitlines() or [""]
    took = f"{outcome.seconds:.0f} s"
    print(f"{_row(attack.part, attack.name, attack.expected, outcome.verdict)}  {took}")
    for line in (first, *more):
        print(textwrap.indent(textwrap.shorten(line, 400), " " * 11))
    sys.stdout.flush()


def _read() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack", description="Attacks the package and says what gave way."
    )
    add = parser.add_argument
    add("--part", action="append", choices=PARTS, help="one part (may be given several times)")
    add("--only", action="append", metavar="WORD", help="attacks whose name holds this")
    add("--minutes", type=float, default=20.0, help="after which none is begun (default: 20)")
    add("--iterations", type=int, default=100, help="of the soak (default: 100)")
    add("--list", action="store_true", help="list the attacks")
    add("--keep", action="store_true", help="keep the temporary folder")
    chosen = parser.parse_args()
    chosen.part = chosen.part or list(PARTS)
    return chosen


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
