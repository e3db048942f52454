"""Batches of a certificate: random documents on random replicas, with random plans."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, ClassVar

import numpy

from megatron_epp.ir import KEEP, OFFLOAD, SELECTIVE, Chunk, Kind, Op, Plan, Step, slices_of
from megatron_epp.ir.random_plan import arbitrary_block, arbitrary_plan, with_local

MASKED = 0.15  # fraction of tokens without a loss
TURN = 8  # approximate tokens of a turn of a conversation
CONTEXT = 64  # most tokens of a document
LONGEST = 60  # below the context, whose end is not special


@dataclass(frozen=True, slots=True)
class Frame:
    """Model and job for which batches are drawn.

    Attributes:
        vocabulary: vocabulary size.
        layers: number of layers of every stage.
        replicas: number of replicas.
        modes: recompute modes to draw from.
        lockstep: number of replicas that shard experts and so run in lockstep; 1 for none.
        vocabulary_parallel: whether all stages shard the LM head (ops H and G).
        ranks: number of context-parallel ranks of a stage. If it exceeds 1, some documents are
            single-rank documents.
        place: pipeline rank of every stage; () if stage i is on rank i.
        alone: if not 0, then in half of the batches every document is one chunk, as in the
            reference model, and its length is a multiple of ``alone``.
    """

    vocabulary: int
    layers: tuple[int, ...]
    replicas: int
    modes: str
    lockstep: int = 1
    vocabulary_parallel: bool = False
    ranks: int = 1
    place: tuple[int, ...] = ()
    alone: int = 0

    def is_alone(self, number: int) -> bool:
        """Return whether every document of batch ``number`` is one chunk."""
        return bool(self.alone) and number.bit_count() % 2 == 1  # alternates between models too

    def draw(self, seed: int, number: int) -> "RandomBatch":
        """Return batch ``number`` of the batches that ``seed`` determines."""
        return draw(seed, number, self)

    def coverage(self, drawn: "RandomBatch", computed: Sequence[Any]) -> "StepCoverage":
        """Return the numbers of documents, chunks, ops and layers in the step of a batch."""
        return StepCoverage.of(drawn)

    def lengths(self, number: int, random: Random) -> list[int]:
        """Return random document lengths of batch ``number``."""
        lengths = random_lengths(number, random, self.replicas)
        if not self.is_alone(number):
            return lengths
        lengths = [-(-length // self.alone) * self.alone for length in lengths]
        return [min(length, CONTEXT - self.alone) for length in lengths]

    def assign(self, documents: int, random: Random) -> tuple[tuple[int, ...], ...]:
        """Assign ``documents`` to random replicas, at least one to each replica."""
        return assignments_of(documents, self.replicas, random, 1)

    def tree(self, lengths: Sequence[int], random: Random) -> Mapping[str, Any]:
        """Return the ``chunks`` and ``prefixes`` of documents, {} if they continue no others."""
        return {}

    def plan(
        self,
        replica: int,
        lengths: Sequence[int],
        random: Random,
        fraction: float,
        alone: bool,
        **drawn: Any,
    ) -> Plan:
        """Return a random plan of ``replica`` for its documents.

        Args:
            replica: number of the replica.
            lengths: tokens of its documents.
            random: source of random numbers.
            fraction: fraction of the backwards that are split into I and W.
            alone: whether every document is one chunk.
            **drawn: further arguments of ``arbitrary_plan``.
        """
        return arbitrary_plan(
            lengths,
            self.layers,
            random,
            split_backward=fraction,
            modes=self.modes,
            replica=replica,
            replicas=self.replicas,
            vocabulary_parallel=self.vocabulary_parallel,
            place=self.place,
            alone=alone,
            **drawn,
        )


def modes_drawn(executable: str) -> str:
    """Return the modes ``executable``, and extra copies of the mode that saves everything.

    A mode drawn at random from the result saves everything with probability 1/3 or more.
    """
    return KEEP * (len(executable) // 2) + executable


@dataclass(frozen=True, slots=True)
class RandomBatch:
    """A global batch of documents, and the steps that run it.

    Attributes:
        tokens: int64 [L + 1] per document; inputs are tokens 0 to L - 1, labels tokens 1 to L.
        loss_masks: float32 [L] per document: weight of each label's loss, 0 for no loss.
        step: the training step.
        evaluation: forward-only step with the same chunks.
    """

    tokens: tuple[numpy.ndarray, ...]
    loss_masks: tuple[numpy.ndarray, ...]
    step: Step
    evaluation: Step

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of inputs of every document."""
        return tuple(len(tokens) - 1 for tokens in self.tokens)

    def sequence(self, document: int) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """Return inputs, labels and loss mask of a document."""
        tokens = self.tokens[document]
        return tokens[:-1], tokens[1:], self.loss_masks[document]

    @property
    def loss_tokens(self) -> int:
        """Sum of the loss masks."""
        return int(sum(mask.sum() for mask in self.loss_masks))

    @property
    def untargeted(self) -> "UntargetedCounts":
        """Counts of slices, chunks and replicas in which no label has a loss."""
        slices = chunks = replicas = 0
        for plan, assignment in zip(self.step.plans, self.step.assignments, strict=True):
            has_target = [
                [self.loss_masks[assignment[span.document]][span.start : span.stop].any()
                 for span in chunk.spans]
                for chunk in plan.chunks
            ]  # fmt: skip
            cut = slices_of(plan).document
            slices += sum(
                not is_targeted
                for chunk, document, every in zip(plan.chunks, cut, has_target, strict=True)
                for span, is_targeted in zip(chunk.spans, every, strict=True)
                if span.document == document
            )
            chunks += sum(bool(every) and not any(every) for every in has_target)
            replicas += not any(map(any, has_target))
        return UntargetedCounts(slices, chunks, replicas)


@dataclass(frozen=True, slots=True)
class UntargetedCounts:
    """Numbers of slices, chunks and replicas in which no label has a loss."""

    slices: int = 0
    chunks: int = 0
    replicas: int = 0


def draw(seed: int, number: int, frame: Frame) -> RandomBatch:
    """Return batch ``number``, which is the same in every process."""
    random = Random(f"{seed} {number}")
    lengths = frame.lengths(number, random)
    generator = numpy.random.default_rng([seed, number])
    tokens = tuple(generator.integers(0, frame.vocabulary, length + 1) for length in lengths)
    # No, half of or all backwards are split.
    fraction = random.choice((0.0, 0.5, 1.0))
    assignments = frame.assign(len(lengths), random)
    plans = _plans(lengths, assignments, frame, random, fraction, frame.is_alone(number))
    if frame.ranks > 1 and number % 3:  # in every third batch all documents are sharded
        where = Random(f"{seed} {number} local")
        plans = tuple(with_local(plan, where, frame.ranks) for plan in plans)
    step = Step(assignments, plans, frame.lockstep)
    return RandomBatch(
        tokens,
        _loss_masks(number, generator, step),
        step,
        Step(assignments, tuple(map(forwards_of, plans)), frame.lockstep),
    )


def _plans(
    lengths: Sequence[int],
    assignments: Sequence[Sequence[int]],
    frame: Frame,
    random: Random,
    fraction: float,
    alone: bool,
) -> tuple[Plan, ...]:
    """Return the plan of every replica; plans of replicas in lockstep share an op template.

    ``fraction`` of the backwards are split into I and W. With ``alone``, every document is a chunk.
    """
    assigned = [[lengths[document] for document in assignment] for assignment in assignments]
    if frame.lockstep == 1:
        return tuple(
            frame.plan(replica, each, random, fraction, alone)
            for replica, each in enumerate(assigned)
        )
    return tuple(
        plan
        for first in range(0, frame.replicas, frame.lockstep)
        for plan in arbitrary_block(
            assigned[first : first + frame.lockstep],
            frame.layers,
            random,
            split_backward=fraction,
            modes=frame.modes,
            first=first,
            replicas=frame.replicas,
            place=frame.place,
            trees=[frame.tree(each, random) for each in assigned[first : first + frame.lockstep]],
        )
    )


def _loss_masks(
    number: int, generator: numpy.random.Generator, step: Step
) -> tuple[numpy.ndarray, ...]:
    """Return the loss mask of every document: float32, one value per input.

    In all batches, the mask is 0 for random labels. In a quarter of the batches, it is also 0 in
    every second turn of a conversation; some slices and some ranks then have no loss. In another
    quarter, only document 0's replica has labels with a loss, and one of its chunks has none.
    """
    lengths = step.lengths
    holes = tuple((generator.random(length) >= MASKED).astype(numpy.float32) for length in lengths)
    holes[0][0] = 1  # a batch without a label has no loss
    kind = (number + number // 8) % 4  # every mixture of lengths meets every kind
    if kind < 2:
        return holes
    if kind == 2:
        for mask in holes:
            # Boundaries of the turns; every second turn, beginning with the first, has no loss.
            boundaries = numpy.flatnonzero(generator.random(len(mask)) < 1 / TURN)
            asked = numpy.searchsorted(boundaries, numpy.arange(len(mask)), side="right") % 2 == 0
            mask[asked] = 0
        holes[0][-1] = 1
        return holes
    for plan, assignment in zip(step.plans, step.assignments, strict=True):
        blank = [chunk for chunk in plan.chunks if not _first_input(chunk, assignment)]
        if 0 in assignment:
            blank = blank and [blank[generator.integers(len(blank))]]
        # Else the whole replica: the one label that must exist is another replica's.
        chosen = [span for chunk in blank for span in chunk.spans]
        for span in chosen:
            holes[assignment[span.document]][span.start : span.stop] = 0
    return holes


def _first_input(chunk: Chunk, assignment: tuple[int, ...]) -> bool:
    """Return whether the chunk contains the first input of the batch's document 0."""
    return any(assignment[span.document] == 0 and span.start == 0 for span in chunk.spans)


def random_lengths(number: int, random: Random, least: int) -> list[int]:
    """Return random lengths, in tokens, of more than ``least`` documents.

    ``number`` selects one of four distributions, which together lead to every kind of chunk.
    Documents of fewer than 8 tokens are not sliced.
    """
    assert LONGEST < CONTEXT
    count = least + random.randint(3, 6)
    # Shifted by one every four batches, so that alternating models meet all four.
    match (number + number // 4) % 4:
        case 0:  # heavy-tailed
            return [round(2 * (LONGEST / 2) ** random.random()) for _ in range(count)]
        case 1:  # one long document and short ones
            return [LONGEST - random.randint(0, 9), *(random.randint(1, 7) for _ in range(count))]
        case 2:  # short ones and a few of medium length
            short = [random.randint(1, 7) for _ in range(count)]
            return [*short, *(random.randint(8, 24) for _ in range(3))]
        case _:  # only long ones
            return [random.randint(20, LONGEST) for _ in range(count)]


def assignments_of(
    documents: int, replicas: int, random: Random, least: int
) -> tuple[tuple[int, ...], ...]:
    """Assign documents to random replicas; every replica gets at least ``least`` (0 or 1)."""
    order = random.sample(range(documents), documents)
    assignments = [order[replica : replica + least] for replica in range(replicas)]
    for document in order[replicas * least :]:
        random.choice(assignments).append(document)
    return tuple(map(tuple, assignments))


def forwards_of(plan: Plan) -> Plan:
    """Return the forward-only plan with the same chunks in the same order."""
    kinds = (Kind.FORWARD, Kind.HEAD)
    orders = tuple(tuple(op for op in order if op.kind in kinds) for order in plan.orders)
    turns = [[stage for stage, op in ran if op.kind in kinds] for ran in plan.rank_orders]
    return replace(plan, orders=orders, turns=tuple(map(tuple, turns)) if plan.turns else ())


@dataclass(frozen=True, slots=True)
class StepCoverage:
    """Numbers of documents, chunks, ops and layers in a step, summed over replicas.

    Attributes:
        documents: number of documents.
        chunks: number of chunks.
        cut: number of sliced documents.
        packed: number of chunks with packed documents.
        split: number of chunks that are a single slice.
        hybrid: number of chunks with a slice and packed documents.
        recomputed: number of recomputed layers, summed over chunks and stages.
        selective: number of recomputed layers that recompute only some modules.
        offloaded: number of offloaded layers, which do not count as recomputed.
        layers: number of layers, summed over chunks and stages.
        halved: number of backwards that are split into I and W.
        window: largest number of (stage, chunk) pairs in flight on a rank.
        empty: number of chunks without a document.
        idle: number of replicas without a document.
        local: number of documents that a single context-parallel rank computes.
        mixed: number of chunks that contain both ``local`` documents and sharded documents.
        untargeted: numbers of slices, chunks and replicas in which no label has a loss.
    """

    ERROR: ClassVar = "loss error"
    HELD: ClassVar = "offloaded as planned, nothing kept after an iteration"

    documents: int
    chunks: int
    cut: int
    packed: int
    split: int
    hybrid: int
    recomputed: int
    selective: int
    offloaded: int
    layers: int
    halved: int
    window: int
    empty: int = 0
    idle: int = 0
    local: int = 0
    mixed: int = 0
    untargeted: UntargetedCounts = field(default_factory=UntargetedCounts)

    @classmethod
    def of(cls, drawn: RandomBatch) -> "StepCoverage":
        """Return the numbers for the step of a batch."""
        step = drawn.step
        kinds = [kind for plan in step.plans for kind in _chunk_kinds(plan)]
        modes = [x for plan in step.plans for stage in plan.recompute for c in stage for x in c]
        orders = [order for plan in step.plans for order in plan.orders]
        return cls(
            documents=len(step.lengths),
            chunks=len(kinds),
            cut=sum(len(set(slices_of(plan).document) - {-1}) for plan in step.plans),
            packed=kinds.count("packed"),
            split=kinds.count("split"),
            hybrid=kinds.count("hybrid"),
            recomputed=sum(mode not in (KEEP, OFFLOAD) for mode in modes),
            selective=sum(mode in SELECTIVE for mode in modes),
            offloaded=modes.count(OFFLOAD),
            layers=len(modes),
            halved=sum(op.kind is Kind.WEIGHT for order in orders for op in order),
            window=max(
                _most_between(ran, lambda stage, chunk: 1)
                for plan in step.plans
                for ran in plan.rank_orders
            ),
            empty=kinds.count("empty"),
            idle=sum(not plan.documents for plan in step.plans),
            local=sum(span.local for plan in step.plans for c in plan.chunks for span in c.spans),
            mixed=sum(c.has_local and c.sharded_tokens > 0 for p in step.plans for c in p.chunks),
            untargeted=drawn.untargeted,
        )

    @property
    def cells(self) -> Mapping[str, object]:
        """Values of a table row, by column name."""
        same = ("documents", "cut", "chunks", "window")
        return {
            **{name: getattr(self, name) for name in same},
            "I+W": self.halved,
            "recomputed": f"{self.recomputed}/{self.layers}",
            "offloaded": self.offloaded,
        }

    @staticmethod
    def summary(every: "Sequence[StepCoverage]") -> list[str]:
        """Return the summary lines over all batches."""

        def total(name: str, of: str = "") -> int:
            return sum(getattr(getattr(one, of) if of else one, name) for one in every)

        lockstep, idle = total("empty") - total("idle"), total("idle")
        empty = f", {lockstep} empty in lockstep" * (lockstep > 0)
        empty += f", {idle} of replicas without a document" * (idle > 0)
        local = (
            f", {total('local')} documents local to a rank, in {total('mixed')} chunks "
            "with sharded rows"
        ) * (total("local") > 0)
        return [
            f"chunks: {total('packed')} packed, {total('split')} split, {total('hybrid')} hybrid"
            f"{empty}{local}; up to {max(one.window for one in every)} in flight on a "
            f"rank; {total('recomputed')} of {total('layers')} layers recomputed, "
            f"{total('selective')} in part, {total('offloaded')} offloaded; "
            f"{total('halved')} backwards in two halves",
            f"without any target: {total('slices', 'untargeted')} slices, "
            f"{total('chunks', 'untargeted')} chunks, {total('replicas', 'untargeted')} replicas",
        ]


def _chunk_kinds(plan: Plan) -> list[str]:
    documents = slices_of(plan).document
    return [
        "empty"
        if not chunk.spans
        else "packed"
        if document < 0
        else "split"
        if len(chunk.spans) == 1
        else "hybrid"
        for chunk, document in zip(plan.chunks, documents, strict=True)
    ]


def most_offloaded(plan: Plan, rank: int, counts: Callable[[Chunk], bool]) -> int:
    """Return the largest number of (layer, chunk) pairs of ``rank`` in host memory at a time.

    Only chunks for which ``counts`` returns true are included.
    """
    away = [
        [
            choice.count(OFFLOAD) if counts(chunk) else 0
            for chunk, choice in zip(plan.chunks, choices, strict=True)
        ]
        for choices in plan.recompute
    ]
    return _most_between(plan.rank_orders[rank], lambda stage, chunk: away[stage][chunk])


def _most_between(ran: Sequence[tuple[int, Op]], amount: Callable[[int, int], int]) -> int:
    """Return the largest sum of ``amount(stage, chunk)`` over the chunks in flight at a time.

    A chunk is in flight on a stage from its F to its B or I. ``ran``: a rank's ops, in order.
    """
    signs = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: -1}
    most = now = 0
    for stage, op in ran:
        now += signs.get(op.kind, 0) * amount(stage, op.chunk)
        most = max(most, now)
    return most
