"""``scripts/attack.sh [--part NAME] [--minutes M] [--iterations N] [--list]``: a table of attacks.

Exit status 0: all held; 1: something gave way, or there was no time to try it.
"""

import argparse
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from attack import damaged_files, lines, random_plans, soak, training
from attack.command_server import CommandServer
from attack.contract import Attack, Outcome, attempt
from attack.material import Material

PARTS = ("lines", "files", "training", "plans", "soak")
_WIDTHS = (9, 46, 44, 9)


@dataclass
class Grounds:
    """What attacks share, made when the first one asks for it. Leaving the context ends it."""

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


def attacks(grounds: Grounds, parts: list[str], iterations: int, plans: int) -> Iterator[Attack]:
    if "lines" in parts:
        yield from lines.attacks(grounds.server, grounds.material)
        yield from lines.training_attacks(grounds.torch_server, grounds.folder / "flags")
    if "files" in parts:
        yield from damaged_files.attacks(grounds.server, grounds.material)
        yield from damaged_files.state_attacks(grounds.torch_server, grounds.material)
    if "training" in parts:
        yield from training.attacks(grounds.folder / "undisturbed")
    if "plans" in parts:
        yield from random_plans.attacks(grounds.server, plans)
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
            for number, attack in enumerate(
                attacks(grounds, chosen.part, chosen.iterations, chosen.plans)
            ):
                if chosen.only and not any(word in attack.name for word in chosen.only):
                    continue
                if chosen.list:
                    print(_row(attack.part, attack.name, attack.expected, ""))
                    continue
                if time.monotonic() > ends:
                    untried += 1
                    continue
                outcome = attempt(attack, folder / f"{number:03d}")
                outcomes.append(outcome)
                _show(outcome)
    finally:
        if not chosen.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if chosen.list:
        return 0
    failed = sum(outcome.failed for outcome in outcomes)
    skipped = sum(outcome.verdict == "skipped" for outcome in outcomes)
    held = len(outcomes) - failed - skipped
    print(
        f"{held} held, {failed} gave way, {skipped} skipped, {untried} not tried for lack of time"
    )
    return 1 if failed or untried else 0


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
        prog="attack.sh", description="Attacks the package and says what gave way."
    )
    add = parser.add_argument
    add("--part", action="append", choices=PARTS, help="one part (may be given several times)")
    add("--only", action="append", metavar="WORD", help="attacks whose name holds this")
    add("--minutes", type=float, default=20.0, help="after which none is begun (default: 20)")
    add("--iterations", type=int, default=100, help="of the soak (default: 100)")
    add("--plans", type=int, default=1000, help="random plans to be run (default: 1000)")
    add("--list", action="store_true", help="list the attacks")
    add("--keep", action="store_true", help="keep the temporary folder")
    chosen = parser.parse_args()
    chosen.part = chosen.part or list(PARTS)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
