"""Sources of steps: their protocols, what they return, and what a planner gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megatron_epp.corpus.shared_prefixes import Batch, PrefixForest
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Step, StepPart

# following(n) returns the document lengths of the batch n iterations later; None if there is none.
Following = Callable[[int], Sequence[int] | None]


class SharingLengths(list[int]):
    """Lengths of a batch's documents, and a function that finds the prefixes that they share.

    A rank calls :meth:`forest` only if it plans the batch or checks a recorded plan, because this
    method reads tokens.
    """

    def __init__(self, lengths: Sequence[int], forest: Callable[[], PrefixForest]):
        super().__init__(lengths)
        self.forest = forest


def planned_documents(lengths: Sequence[int]) -> Batch:
    """Return what a planner plans: the lengths, or the forest if documents share tokens.

    Raises:
        ValueError: the tokens of a document cannot be read.
    """
    forest = lengths.forest() if isinstance(lengths, SharingLengths) else None
    return forest if forest is not None and forest.shares else lengths


@dataclass(frozen=True, slots=True)
class Planning:
    """Record of the planning of an iteration; ranks that do not plan have the default values.

    Attributes:
        waited_seconds: time that training waited for the plan.
        ahead: number of iterations planned ahead.
        discarded: number of plans made ahead that were discarded since the previous iteration.
    """

    waited_seconds: float = 0.0
    ahead: int = 0
    discarded: int = 0


@dataclass(frozen=True, slots=True)
class SourcedStep:
    """Step or part of a step, with its text.

    Attributes:
        step: full step, which is equal on all ranks, or the part of this rank's lockstep group.
            Without lockstep, the group is a replica.
        text: ``str(step)``, stored so that the step is formatted or parsed only once.
        source: name of the plan in error messages.
        planning: record of how the plan was made.
    """

    step: Step | StepPart
    text: str
    source: str = "the plan"
    planning: Planning = Planning()


class StepSource(Protocol):
    """Source of the step of every iteration; all ranks call its methods.

    All ranks get the same step, or every rank gets the part of its lockstep group. If some ranks
    raise a ValueError, :mod:`.accept` raises a PlanError on all ranks.
    """

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> SourcedStep:
        """Return the step of ``iteration`` for documents of ``lengths`` tokens."""

    def look_ahead(self, iteration: int, following: Following) -> None:
        """Begin to plan later iterations while ``iteration`` runs.

        ``following(n)`` returns the document lengths of the batch n iterations later, or None if
        there is no such batch.
        """


@runtime_checkable
class PredictingSource(StepSource, Protocol):
    """Source with a cost model, whose predictions can be compared with measured times."""

    @property
    def cost(self) -> Cost:
        """Cost model that predicts the ops."""
