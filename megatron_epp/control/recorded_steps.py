"""Steps read from one file that serves all iterations, or from a folder with a file for each."""

from collections.abc import Sequence
from pathlib import Path

from megatron_epp.control.step_source import Following, SourcedStep
from megatron_epp.ir import Plan, PlanError, Step
from megatron_epp.safe_files import read_bounded

MOST_BYTES = 256 << 20  # of a file; a plan of a hundred thousand chunks has a few MiB


class RecordedSteps:
    """Source of the recorded steps of ``--epp-plan``, which every rank reads.

    Args:
        path: file with one step for all iterations, or folder with a file for every iteration.

    Raises:
        ValueError: the file or folder does not exist, or the file is not a text file.
        PlanError: the file cannot be read, or its text is not a valid step.
    """

    def __init__(self, path: str):
        self.path = Path(path)
        self._step: SourcedStep | None = None
        if not self.path.exists():
            raise ValueError(f"--epp-plan {path}: no such file or folder")
        if not self.path.is_dir():
            self._step = _read(self.path)

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> SourcedStep:
        """Return the recorded step of ``iteration``; if --epp-plan is a file, return its only step.

        ``lengths`` and ``forward_only`` are not used.

        Raises:
            ValueError: the file is not a text file.
            PlanError: the folder has no step of the iteration, the step's file cannot be read, or
                its text is not a valid step.
        """
        if self._step is not None:
            return self._step
        path = self.path / f"iteration-{iteration:06d}.step"
        if not path.exists():
            raise PlanError(f"--epp-plan {self.path}: holds no {path.name}")
        return _read(path)

    def look_ahead(self, iteration: int, following: Following) -> None:
        """Do nothing: recorded steps need no preparation."""


def first_recorded(path: str) -> Plan:
    """Return the first replica's plan of the first step of ``--epp-plan``.

    Raises:
        ValueError: the path does not exist, has no step, cannot be read, or is not a valid step.
    """
    source = RecordedSteps(path)
    if source._step is not None:
        return source._step.step.plans[0]
    recorded = sorted(source.path.glob("iteration-*.step"))
    if not recorded:
        raise PlanError(f"--epp-plan {path}: holds no iteration-000001.step")
    return _read(recorded[0]).step.plans[0]


def _read(path: Path) -> SourcedStep:
    try:
        step = Step.parse(read_bounded(path, MOST_BYTES, "a plan or a step").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"--epp-plan {path}: not a text file") from error
    except (ValueError, OSError) as error:
        raise PlanError(f"--epp-plan {path}: {error}") from error
    return SourcedStep(step, str(step), f"--epp-plan {path}: the plan")
