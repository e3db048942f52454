"""Sources of steps, as types: given ones, predicted ones, and those that learn as they go."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megatron_epp.control.memory_budget import MemoryBudget
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Step, StepPart

# Lengths of the batch that comes so many iterations later; None: there is none.
Following = Callable[[int], Sequence[int] | None]


@dataclass(frozen=True, slots=True)
class Planning:
    """How an iteration's plan came about, on the rank that has it made; zeros on the others.

    waited_seconds   that training waited for it
    ahead            iterations that are planned ahead
    discarded        plans that were made ahead and discarded, since the iteration before
    fell_back        why another planner stood in; empty: none did
    """

    waited_seconds: float = 0.0
    ahead: int = 0
    discarded: int = 0
    fell_back: str = ""


@dataclass(frozen=True, slots=True)
class SourcedStep:
    """A step with its text, which ranks compare, and the words that name it in a refusal.

    ``step`` is the whole one, the same on all ranks, or the part of this rank's replica.
    ``text`` is ``str(step)``: printed, or read, once; whoever makes the step hands it on.
    """

    step: Step | StepPart
    text: str
    source: str = "the plan"
    planning: Planning = Planning()


class StepSource(Protocol):
    """Gives the step of every iteration. All ranks call it, and all get the same step, or each its
    replica's part of it.

    A ValueError that some ranks raise alone is everybody's (:mod:`.accept`).
    """

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> SourcedStep: ...

    def look_ahead(self, iteration: int, following: Following) -> None:
        """``iteration`` runs; training will ask for those that follow: begin with them."""


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

    def keep_fallbacks(self, iteration: int) -> None:
        """Keep which replicas' plans another planner made in ``iteration``. Collective."""
