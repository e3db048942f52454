"""Protocols of step sources: recorded, predicting, and adaptive ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megatron_epp.control.memory_budget import MemoryBudget
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Step, StepPart

# Returns the lengths of the batch that many iterations later; None: there is none.
Following = Callable[[int], Sequence[int] | None]


@dataclass(frozen=True, slots=True)
class Planning:
    """How an iteration's plan came about, on the rank that plans; zeros on the others.

    Attributes:
        waited_seconds: time that training waited for the plan.
        ahead: number of iterations planned ahead.
        discarded: number of plans made ahead and discarded since the iteration before.
        fell_back: reason why the fallback planned; empty if it did not.
    """

    waited_seconds: float = 0.0
    ahead: int = 0
    discarded: int = 0
    fell_back: str = ""


@dataclass(frozen=True, slots=True)
class SourcedStep:
    """Step with its text, which ranks compare, and the name of its source for error messages.

    Attributes:
        step: whole step, the same on all ranks, or the part of this rank's replica.
        text: ``str(step)``, printed or read once and then passed on.
        source: name of the plan in error messages.
        planning: how the plan came about.
    """

    step: Step | StepPart
    text: str
    source: str = "the plan"
    planning: Planning = Planning()


class StepSource(Protocol):
    """Supplier of the step of every iteration, which all ranks call.

    All ranks get the same step, or each the part of its replica. If some ranks raise a ValueError,
    :mod:`.accept` raises it on all ranks.
    """

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> SourcedStep:
        """Return the step of the iteration for a batch of these lengths."""

    def look_ahead(self, iteration: int, following: Following) -> None:
        """Begin to plan the iterations after ``iteration``, which runs now."""


@runtime_checkable
class PredictingSource(StepSource, Protocol):
    """Source with a cost model, whose predictions can be compared with measured times."""

    @property
    def cost(self) -> Cost:
        """Cost model that predicts the ops."""


@runtime_checkable
class AdaptiveSource(PredictingSource, Protocol):
    """Source that plans during training within a memory budget, and can plan otherwise."""

    @property
    def budget(self) -> MemoryBudget:
        """Memory budget of the plans; call :meth:`narrow` after changing it."""

    def narrow(self) -> None:
        """Save the changed budget and plan with it from now on."""

    def shrink_evaluation(self, tokens: int) -> None:
        """Evaluate in chunks of at most ``tokens`` from now on."""

    def adopt(self, profile: Profile) -> None:
        """Plan with another cost model from now on."""

    def took(self, seconds: float) -> None:
        """Set the time of the last iteration, from which time-outs follow."""

    def keep_fallbacks(self, iteration: int) -> None:
        """Record which replicas the fallback planned in ``iteration``. Collective."""
