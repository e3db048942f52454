"""Steps that somebody else made: one file for every iteration, or a folder of recorded steps."""

from collections.abc import Sequence
from pathlib import Path

from megatron_epp.ir import PlanError, Step


class FixedSteps:
    """Reads ``--epp-plan``; every rank reads it, and the ranks compare what they read."""

    budget = None  # whoever made the plans kept one
    cost = None

    def __init__(self, path: str):
        self.path = Path(path)
        self.source = f"--epp-plan {path}: the plan"
        self._step: Step | None = None
        if not self.path.exists():
            raise ValueError(f"--epp-plan {path}: no such file or folder")
        if not self.path.is_dir():
            self._step = _read(self.path)

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> Step:
        if self._step is not None:
            return self._step
        path = self.path / f"iteration-{iteration:06d}.step"
        if not path.exists():
            raise PlanError(f"--epp-plan {self.path}: holds no {path.name}")
        self.source = f"--epp-plan {path}: the plan"
        return _read(path)

    def look_ahead(self, iteration: int, lengths: Sequence[int]) -> None:
        """Nothing to prepare: the plan is there."""


def _read(path: Path) -> Step:
    try:
        return Step.parse(path.read_text())
    except UnicodeDecodeError as error:
        raise ValueError(f"--epp-plan {path}: not a text file") from error
    except ValueError as error:
        raise PlanError(f"--epp-plan {path}: {error}") from error
