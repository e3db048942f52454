"""Batches of the project's own certificates: prefixes, plans of planners, few documents."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any, ClassVar

import numpy

from megatron_epp.certify.batches import (
    CONTEXT,
    Frame,
    RandomBatch,
    StepCoverage,
    assignments_of,
    draw,
    random_lengths,
)
from megatron_epp.certify.trainer_results import TrainerResult
from megatron_epp.ir import Plan, Step
from tests.certify.trees import arbitrary_tree


@dataclass(frozen=True, slots=True)
class CheckedResult(TrainerResult):
    """Results of one rank, with its traffic in training.

    Attributes:
        messages: number of messages sent and received.
        collectives: number of collectives by name (allowed_collectives.py).
    """

    messages: int
    collectives: Counter[str]


def traffic_of(computed: Sequence[Any]) -> dict[str, Any]:
    """Return the messages between all ranks, and their collectives by name."""
    return {
        "messages": sum(one.messages for one in computed) // 2,
        "collectives": sum((one.collectives for one in computed), Counter()),
    }


def summary_of_collectives(every: Sequence[Any]) -> str:
    """Return the summary line of the collectives of all batches."""
    counts = sorted(sum((one.collectives for one in every), Counter()).items())
    return f"collectives: {', '.join(f'{name} {count}' for name, count in counts) or 'none'}"


@dataclass(frozen=True, slots=True)
class CheckedFrame(Frame):
    """Model and job for which batches are drawn.

    Attributes:
        trees: whether some documents continue other documents (shared prefixes).
        make_plan: function from the document lengths of a replica to its plan; None for random
            plans.
        documents: number of documents of every batch, each on a random replica; a replica may have
            no document. 0 for a few more documents than replicas, at least one on each replica.
    """

    trees: bool = False
    make_plan: Callable[[Sequence[int]], Plan] | None = None
    documents: int = 0

    def draw(self, seed: int, number: int) -> RandomBatch:
        """Return batch ``number`` of the batches that ``seed`` determines."""
        drawn = draw(seed, number, self)
        if not self.trees:
            return drawn
        step = drawn.step
        if number % 2:
            # A shared prefix counts once per document that continues it, as a copy's loss would.
            for plan, assignment in zip(step.plans, step.assignments, strict=True):
                for prefix in filter(None, plan.prefixes):
                    drawn.loss_masks[assignment[prefix.document]][: prefix.stop] *= 2
        return TreeBatch(drawn.tokens, drawn.loss_masks, step, drawn.evaluation)

    def coverage(self, drawn: RandomBatch, computed: Sequence[Any]) -> "CheckedCoverage":
        """Return the numbers of documents, chunks, messages and other items of a batch."""
        counted = StepCoverage.of(drawn)
        return CheckedCoverage(
            **{one.name: getattr(counted, one.name) for one in fields(StepCoverage)},
            **traffic_of(computed),
            branches=sum(p is not None for plan in drawn.step.plans for p in plan.prefixes),
            beside=sum(map(_beside, drawn.step.plans)),
        )

    def lengths(self, number: int, random: Random) -> list[int]:
        """Return random document lengths of batch ``number``."""
        if self.documents:
            return random_lengths(number, random, self.documents)[: self.documents]
        lengths = Frame.lengths(self, number, random)
        # Shorter, so that prefixes fit before them.
        return [-(-length // 3) for length in lengths] if self.trees else lengths

    def assign(self, documents: int, random: Random) -> tuple[tuple[int, ...], ...]:
        """Assign ``documents`` to random replicas."""
        return assignments_of(documents, self.replicas, random, 0 if self.documents else 1)

    def plan(
        self,
        replica: int,
        lengths: Sequence[int],
        random: Random,
        fraction: float,
        alone: bool,
        **drawn: Any,
    ) -> Plan:
        """Return a plan of ``replica`` for its documents; for the arguments see ``Frame``."""
        if self.make_plan is not None:
            return replace(self.make_plan(lengths), replica=replica, replicas=self.replicas)
        if self.trees:
            drawn = arbitrary_tree(lengths, random, CONTEXT - 1)
        return Frame.plan(self, replica, lengths, random, fraction, alone, **drawn)


@dataclass(frozen=True, slots=True)
class TreeBatch(RandomBatch):
    """Batch in which documents continue other documents."""

    _before: Any = field(default=None, init=False, repr=False, compare=False)

    def sequence(self, document: int) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """Return inputs, labels and loss mask of a document, including those of its prefixes.

        The mask is 0 on prefixes, because the documents that own the prefixes count their losses.
        """
        if self._before is None:
            object.__setattr__(self, "_before", _documents_before(self.step))
        parts = [(d, stop, 0.0) for d, stop in self._before[document]]
        parts.append((document, len(self.loss_masks[document]), 1.0))
        inputs = [self.tokens[d][:stop] for d, stop, _ in parts]
        labels = [self.tokens[d][1 : stop + 1] for d, stop, _ in parts]
        masks = [self.loss_masks[d][:stop] * numpy.float32(own) for d, stop, own in parts]
        return numpy.concatenate(inputs), numpy.concatenate(labels), numpy.concatenate(masks)


def _documents_before(step: Step) -> dict[int, list[tuple[int, int]]]:
    """Return, for every document of the batch, its prefixes in order: (document, tokens of it)."""
    return {
        document: [(assignment[span.document], span.stop) for span in plan.prefix_of(number)]
        for plan, assignment in zip(step.plans, step.assignments, strict=True)
        for number, document in enumerate(assignment)
    }


@dataclass(frozen=True, slots=True)
class CheckedCoverage(StepCoverage):
    """Numbers of a step's documents, chunks, messages and other items.

    Attributes:
        messages: number of messages between ranks.
        collectives: number of collectives by name.
        branches: number of documents that continue another document.
        beside: number of branches that start in the chunk in which their prefix ends.
    """

    HELD: ClassVar = (
        "messages as planned, collectives all on the list, nothing kept after an iteration"
    )

    messages: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    branches: int = 0
    beside: int = 0

    @property
    def cells(self) -> Mapping[str, object]:
        """Values of a table row, by column name."""
        return {**StepCoverage.cells.fget(self), "messages": self.messages}

    @staticmethod
    def summary(every: "Sequence[CheckedCoverage]") -> list[str]:
        """Return the summary lines over all batches."""
        branches, beside = (sum(getattr(o, name) for o in every) for name in ("branches", "beside"))
        trees = f"{branches} documents continue others, {beside} in the chunk of what they continue"
        lines = [*StepCoverage.summary(every), summary_of_collectives(every)]
        return [*lines, trees] if branches else lines


def _beside(plan: Plan) -> int:
    """Return the number of documents that start in the chunk in which their prefix ends."""
    ends = {
        (span.document, span.stop): number
        for number, chunk in enumerate(plan.chunks)
        for span in chunk.spans
    }
    firsts = {
        span.document: number
        for number, chunk in enumerate(plan.chunks)
        for span in chunk.spans
        if span.start == 0
    }
    return sum(
        prefix is not None and ends[prefix.document, prefix.stop] == firsts[document]
        for document, prefix in enumerate(plan.prefixes)
    )
