"""Record of the iterations that the fallback planner planned because the planner failed.

The fallback's plan differs from the planner's, so losses differ by rounding or by dropout's random
numbers. A run that resumes before such an iteration must use the same planner again. Every fallback
is therefore a line in a file next to the checkpoint:

    iteration 2 planner packing the planner process has ended

If replicas plan separately, the line names the replica whose planner failed. In lockstep it names
the first replica of the group:

    iteration 2 replica 1 of 2 planner packing the planner process has ended
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_epp.control.files import BestEffort, write_atomically
from megatron_epp.ir.errors import quoted
from megatron_epp.safe_files import bounded_text

FALLBACKS_FILE = "epp-fallbacks.txt"

_LINE = re.compile(
    r"iteration ([1-9]\d{0,14})( replica (\d{1,9}) of (\d{1,9}))? planner (\S+) (.+)"
)
Place = tuple[int, int] | None  # (replica, number of replicas); None: all replicas


class Fallbacks:
    """Fallbacks of this run and of the run that it resumes.

    Files of other runs in ``folders`` are overwritten.

    Args:
        folders: folders in which the fallbacks are saved.
        loaded_from: folder of the run that is resumed.

    Raises:
        ValueError: the file in ``loaded_from`` cannot be parsed.
    """

    def __init__(self, folders: Sequence[str], loaded_from: str | None = None):
        self.folders = tuple(folders)
        self._try = BestEffort()
        self._lines: dict[tuple[int, Place], str] = {}
        self._planners: dict[tuple[int, Place], str] = {}
        if loaded_from is not None and (path := Path(loaded_from) / FALLBACKS_FILE).exists():
            self.read(bounded_text(path, "a list of fallbacks", "replace"), str(path))
        for folder in self.folders:
            if self._lines or (Path(folder) / FALLBACKS_FILE).exists():
                self._write(folder)

    def read(self, text: str, source: str = "") -> None:
        """Parse and add the lines of ``text``; ``source`` names the file in errors.

        Raises:
            ValueError: a line cannot be parsed.
        """
        for number, line in enumerate(text.splitlines(), 1):
            match = _LINE.fullmatch(line)
            if match is None:
                raise ValueError(
                    f"{source}, line {number}: {quoted(line)} is not a fallback; expected "
                    "'iteration N planner NAME REASON'; delete the file: the planner then "
                    "plans those iterations, which may round otherwise than before the resume"
                )
            place = (int(match[3]), int(match[4])) if match[2] else None
            self._note(int(match[1]), place, match[5], line)

    @property
    def text(self) -> str:
        """All lines, in the format of the file."""
        ordered = sorted(self._lines.items(), key=lambda item: (item[0][0], item[0][1] or ()))
        return "".join(f"{line}\n" for _, line in ordered)

    def of(self, iteration: int, place: Place = None) -> str | None:
        """Return the fallback planner that planned ``iteration`` for ``place``; None if none did.

        ``place`` is (replica, number of replicas); None for all replicas.
        """
        everywhere = self._planners.get((iteration, None))
        return self._planners.get((iteration, place), everywhere)

    def add(self, iteration: int, planner: str, reason: str, place: Place = None) -> None:
        """Record and save that ``planner`` planned an iteration instead of the usual planner.

        Args:
            iteration: number of the iteration.
            planner: name of the fallback planner.
            reason: reason for the failure of the usual planner.
            place: (replica, number of replicas); None for all replicas.
        """
        words = " ".join(reason.split()) or "no reason"
        where = "" if place is None else f"replica {place[0]} of {place[1]} "
        line = f"iteration {iteration} {where}planner {planner} {words}"
        self._note(iteration, place, planner, line)
        for folder in self.folders:
            self._try(
                f"which iterations were planned by a fallback, in {folder}/{FALLBACKS_FILE},",
                partial(self._write, folder),
            )

    def _note(self, iteration: int, place: Place, planner: str, line: str) -> None:
        self._lines[iteration, place], self._planners[iteration, place] = line, planner

    def _write(self, folder: str) -> None:
        write_atomically(Path(folder) / FALLBACKS_FILE, self.text)
