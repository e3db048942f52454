"""Sources of steps, as types: given ones, predicted ones, and those that learn as they go."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megatron_epp.control.memory_budget import MemoryBudget
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Step


@dataclass(frozen=True, slots=True)
class SourcedStep:
    """A step with its text, which ranks compare, and the words that name it in a refusal.

    ``text`` is ``str(step)``: printed, or read, once; whoever makes the step hands it on.
    """

    step: Step
    text: str
    source: str = "the plan"


class StepSource(Protocol):
    """Gives the step of every iteration. All ranks call it, and all get the same step."""

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> SourcedStep: ...

    def look_ahead(self, iteration: int, lengths: Sequence[int]) -> None:
        """Training will ask for ``iteration`` with these lengths: begin with it."""


@runtime_checkable
class PredictingSource(StepSource, Protocol):
    """A source that knows a cost model: what its ops should take can be compared with what they
    take."""

    @property
    def cost(self) -> Cost: ...


@runtime_checkable
class AdaptiveSource(PredictingSource, Protocol):
    """A source that plans as it goes, within a budget, and can be told to do otherwise."""

    @property
    def budget(self) -> MemoryBudget:
        """The budget of plans; whoever changes it calls :meth:`narrow`."""

    def narrow(self) -> None:
        """The budget has changed: keep it, and plan with it from now on."""

    def shrink_evaluation(self, tokens: int) -> None:
        """Evaluate in chunks of at most ``tokens`` from now on."""

    def adopt(self, profile: Profile) -> None:
        """Plan with another cost model from now on."""

    def took(self, seconds: float) -> None:
        """The last iteration's seconds: by them is judged what takes too long."""
