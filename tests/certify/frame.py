"""Batches of the project's own certificates: prefixes, plans of planners, few documents."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from random import Random
from typing import Any, ClassVar

import numpy

from megatron_epp.certify.batches import (
    CONTEXT,
    MASKED,
    Frame,
    RandomBatch,
    StepCoverage,
    UntargetedCounts,
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
        depths: number of MTP layers, with trees.
    """

    trees: bool = False
    make_plan: Callable[[Sequence[int]], Plan] | None = None
    documents: int = 0
    depths: int = 0

    def draw(self, seed: int, number: int) -> RandomBatch:
        """Return batch ``number`` of the batches that ``seed`` determines."""
        drawn = draw(seed, number, self)
        return sharing(drawn, seed, number, self) if self.trees else drawn

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
        return [max(-(-n // 3), self.depths) for n in lengths] if self.trees else lengths

    def assign(self, documents: int, random: Random) -> tuple[tuple[int, ...], ...]:
        """Assign ``documents`` to random replicas."""
        return assignments_of(documents, self.replicas, random, 0 if self.documents else 1)

    def tree(self, lengths: Sequence[int], random: Random) -> Mapping[str, Any]:
        """Return random prefixes of documents and their chunks, with ``trees``."""
        return arbitrary_tree(lengths, random, CONTEXT - 1, whole=True) if self.trees else {}

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
        drawn = {**drawn, **self.tree(lengths, random)}
        return Frame.plan(self, replica, lengths, random, fraction, alone, **drawn)


class TreeBatch(RandomBatch):
    """Batch in which documents share documents of the plan."""

    @property
    def untargeted(self) -> UntargetedCounts:
        """Nothing: masks are not drawn by slices."""
        return UntargetedCounts()


def sharing(drawn: RandomBatch, seed: int, number: int, frame: CheckedFrame) -> TreeBatch:
    """Return the batch of which the documents of ``drawn`` are the shared parts.

    Documents end in every part that no other continues, and in some others; some documents are
    equal. Their loss masks differ, also in what they share. After a part, all documents have the
    same 1 + D tokens, of which the last rows of the part are to predict some (D: MTP layers).
    """
    random, generator = Random(f"{seed} {number} ends"), numpy.random.default_rng([seed, number, 1])
    step, each = drawn.step, 1 + frame.depths
    assignments, ends, tokens = [], [], []
    for plan, parts in zip(step.plans, step.assignments, strict=True):
        whole: list[numpy.ndarray] = []  # of each part: all tokens up to its end
        ahead: list[numpy.ndarray] = []  # the tokens after them
        for at, length in enumerate(plan.documents):
            prefix = plan.prefix_of(at)
            parent = prefix[-1].document if prefix else -1
            stream = drawn.tokens[parts[at]][:length]
            before = whole[parent] if prefix else stream[:0]
            known = ahead[parent] if prefix else stream[:0]
            more = generator.integers(0, frame.vocabulary, each)
            stream = numpy.concatenate((known, stream[len(known) :], more))
            whole.append(numpy.concatenate((before, stream[:length])))
            ahead.append(stream[length : length + each])
        inner = {span.document for span in filter(None, plan.prefixes)}
        own = [at for at in range(len(whole)) if at not in inner]
        if not frame.depths:  # what ends has no targets further ahead, unlike what goes on
            own += [at for at in sorted(inner) if random.random() < 0.4]
        own += [at for at in own if random.random() < 0.3]
        random.shuffle(own)
        assignments.append(tuple(range(len(tokens), len(tokens) + len(own))))
        ends.append(tuple(own))
        tokens += [numpy.concatenate((whole[at], ahead[at][:1])) for at in own]
    masks = tuple(generator.random(len(each) - 1) >= MASKED for each in tokens)
    for mask in masks:
        mask[: generator.integers(len(mask)) * (number % 2)] = False  # a prompt, for some
        mask[-1] = True
    make = partial(Step, tuple(assignments), lockstep=step.lockstep, ends=tuple(ends))
    return TreeBatch(
        tuple(tokens),
        tuple(mask.astype(numpy.float32) for mask in masks),
        make(step.plans),
        make(drawn.evaluation.plans),
    )


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
