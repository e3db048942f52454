"""Iterations that were planned by the fallback, because the planner failed: kept, and replayed.

A planner dies by accident, and the plan that is used meanwhile is another one: the losses differ
by rounding, or by what dropout draws. A run that is resumed from before such an iteration would
ask a planner that lives. So every fallback is a line in a file beside the checkpoint:

    iteration 2 planner packing the planner process has ended
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_epp.control.files import BestEffort, write_atomically
from megatron_epp.ir.errors import quoted
from megatron_epp.safe_files import bounded_text

FALLBACKS_FILE = "epp-fallbacks.txt"

_LINE = re.compile(r"iteration ([1-9]\d{0,14}) planner (\S+) (.+)")


class Fallbacks:
    """``folders``: where they are kept; ``loaded_from``: the folder of the run that is resumed.

    What another run left in ``folders`` is forgotten. ValueError: a file that cannot be read.
    """

    def __init__(self, folders: Sequence[str], loaded_from: str | None = None):
        self.folders = tuple(folders)
        self._try = BestEffort()
        self._lines: dict[int, str] = {}
        self._planners: dict[int, str] = {}
        if loaded_from is not None and (path := Path(loaded_from) / FALLBACKS_FILE).exists():
            text = bounded_text(path, "a list of fallbacks", "replace")
            for number, line in enumerate(text.splitlines(), 1):
                match = _LINE.fullmatch(line)
                if match is None:
                    raise ValueError(
                        f"{path}, line {number}: {quoted(line)} is no fallback; expected "
                        "'iteration N planner NAME REASON'; delete the file: the planner then "
                        "plans those iterations, which may round otherwise than before the resume"
                    )
                self._note(int(match[1]), match[2], line)
        for folder in self.folders:
            if self._lines or (Path(folder) / FALLBACKS_FILE).exists():
                self._write(folder)

    def of(self, iteration: int) -> str | None:
        """The planner that stood in for the planner in ``iteration``, if one did."""
        return self._planners.get(iteration)

    def add(self, iteration: int, planner: str, reason: str) -> None:
        words = " ".join(reason.split()) or "no reason"
        self._note(iteration, planner, f"iteration {iteration} planner {planner} {words}")
        for folder in self.folders:
            self._try(
                f"which iterations were planned by a fallback, in {folder}/{FALLBACKS_FILE},",
                partial(self._write, folder),
            )

    def _note(self, iteration: int, planner: str, line: str) -> None:
        self._lines[iteration], self._planners[iteration] = line, planner

    def _write(self, folder: str) -> None:
        lines = (line for _, line in sorted(self._lines.items()))
        write_atomically(Path(folder) / FALLBACKS_FILE, "".join(f"{line}\n" for line in lines))
