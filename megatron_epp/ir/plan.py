"""Plan: a frozen value with a text form and a digest.

    plan v1
    replica 0 of 1
    documents 9000 1500 900              # tokens of documents 0, 1, 2 of this replica
    layers 4 4                           # transformer layers of stages 0, 1
    chunk 0: 0[0:5000]                   # spans are half-open
    chunk 1: 0[5000:9000] 1[0:1500]      # hybrid: the tail of document 0 and all of document 1
    chunk 2: 2[0:900]
    recompute 0: 3f1k 4k 2c2k            # stage 0, chunks 0, 1, 2; 3f1k: modes f f f k
    recompute 1: 4k 4k 4k
    stage 0: F0 F1 F2 B1 B0 B2
    stage 1: F0 F1 B1 B0 F2 B2
    predicted seconds 1.234 peak_gib 10.5 9.8 planner epp

The ``replica``, ``recompute`` and ``predicted`` lines are optional. Without them a plan is for
replica 0 of 1, recomputes nothing and has no prediction. The order of the lines is fixed.
:mod:`megatron_epp.ir.recompute` defines the recompute modes. With vocabulary parallelism every
stage also runs H and G of every chunk (``H0``, ``G0``).

A chunk may be empty (``chunk 3: -``), because all replicas of a lockstep group need the same number
of chunks (:mod:`megatron_epp.ir.step`). A replica without documents (``documents -``) has one empty
chunk, so that it takes part in collectives. ``2[0:900]@1`` is a single-rank document:
context-parallel rank 1 computes document 2 alone (:mod:`megatron_epp.ir.span`).

With the line ``prefix 3: 0[0:4000]`` after ``documents``, document 3 continues the first 4000
tokens of document 0. These tokens are computed once, even if several documents continue them. Token
0 of document 3 is its first token after the prefix and has position 4000. A span of document 0 must
end at token 4000 (:mod:`megatron_epp.ir.slices`).

Stage i is on rank i of the pipeline unless a ``place`` line after ``layers`` says otherwise. If a
rank has several stages, the plan lists ops by rank instead of stage, and every op names its stage:
``F3.0`` is F of stage 3 on chunk 0. ``peak_gib`` has one number per rank.

    layers 2 2 2 2
    place 1 0 0 1                        # ranks of stages 0 to 3: a V
    ...
    rank 0: F1.0 F2.0 B2.0 B1.0
    rank 1: F0.0 F3.0 B3.0 B0.0
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from megatron_epp.ir.chunk import EMPTY, Chunk
from megatron_epp.ir.errors import PlanError, quoted, shortened
from megatron_epp.ir.op import MAKE_GRADIENTS, OF_HEAD, Kind, Op, StageOp
from megatron_epp.ir.placement import Placement
from megatron_epp.ir.recompute import KEEP, MODES, MOST_LAYERS, format_recompute, parse_recompute
from megatron_epp.ir.span import NUMBER, Span

# Limits far above any real plan, so that no small file takes minutes or gigabytes to parse.
MOST_LINES = 2_000_000
MOST_CHOICE_LAYERS = 10_000_000  # in the distinct recompute choices
MOST_CONTINUED = 1_000_000  # pairs of a document and one of its ancestors by prefixes

_NUMBER = re.compile(NUMBER)
# Floats as Python prints them: 16 digits before the point, 20 after it (0.00012345678901234567).
_DECIMAL = re.compile(r"[0-9]{1,16}(\.[0-9]{1,20})?(e[+-]?[0-9]{1,3})?")
Orders = tuple[tuple[Op, ...], ...]
Turns = tuple[tuple[int, ...], ...]
Prefixes = tuple[Span | None, ...]  # the span that each document continues, or None
_PLANNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of the planner: seconds of the iteration and peak memory of every rank.

    Attributes:
        seconds: time of the iteration in seconds.
        peak_gib: peak memory of each rank in GiB; on CPUs, model states are not counted.
        planner: name of the planner.

    Raises:
        PlanError: a number is negative or not finite, or the planner's name is not one word.
    """

    seconds: float
    peak_gib: tuple[float, ...]  # -
    planner: str

    def __post_init__(self):
        for value in (self.seconds, *self.peak_gib):
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(f"predicted {value}: expected a finite number of at least 0")
        if _PLANNER.fullmatch(self.planner) is None:
            raise PlanError(f"planner {quoted(self.planner)}: expected one word, as in epp")

    def __str__(self) -> str:
        peaks = " ".join(map(repr, map(float, self.peak_gib)))
        return f"predicted seconds {float(self.seconds)!r} peak_gib {peaks} planner {self.planner}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Chunks, the order of ops on every stage, and the recompute modes of every stage and chunk.

    The constructor verifies indices and sizes only. :func:`megatron_epp.ir.check.check` verifies
    that the plan computes every token once and cannot deadlock.

    Attributes:
        documents: number of tokens of each document of this replica.
        layers: number of transformer layers of each stage.
        chunks: spans of each chunk.
        recompute: ``recompute[s][c]`` contains the mode of each layer of stage s for chunk c
            (:mod:`megatron_epp.ir.recompute`).
        orders: ops of each stage in execution order.
        replica: data-parallel rank.
        replicas: data-parallel size.
        predicted: the planner's prediction, if any.
        place: rank of each stage; empty if stage i is on rank i.
        turns: ``turns[r]`` lists the stage of each op that rank r runs, in execution order; empty
            if every rank has one stage.
        prefixes: ``prefixes[d]`` is the prefix that document d continues, a span of another
            document from its token 0 on, or None. Empty if no document has a prefix.

    Raises:
        PlanError: an index or a size is invalid.

    Example:
        >>> plan = Plan.parse('''plan v1
        ... documents 9000 900
        ... layers 2 2
        ... chunk 0: 0[0:9000]
        ... chunk 1: 1[0:900]
        ... stage 0: F0 F1 B0 B1
        ... stage 1: F0 B0 F1 B1
        ... ''')
        >>> check(plan)
        >>> plan.stages, plan.tokens, plan.forward_only
        (2, 9900, False)
    """

    documents: tuple[int, ...]
    layers: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    recompute: tuple[tuple[str, ...], ...]
    orders: tuple[tuple[Op, ...], ...]
    replica: int = 0
    replicas: int = 1
    predicted: Prediction | None = None
    place: tuple[int, ...] = ()
    turns: tuple[tuple[int, ...], ...] = ()
    prefixes: Prefixes = ()
    # Caches of ir.slices.slices_of and of ``kinds``, which depend on the fields above only.
    _slices: Any = field(default=None, init=False, repr=False, compare=False)
    _kinds: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self):
        if not (self.layers and self.chunks):
            raise PlanError("a plan needs at least one stage and one chunk")
        if min(self.documents, default=1) < 1:
            raise PlanError(f"a document of {min(self.documents)} inputs; expected at least 1")
        if not all(0 <= layers <= MOST_LAYERS for layers in self.layers):
            raise PlanError(f"{max(self.layers)} layers on a stage; expected at most {MOST_LAYERS}")
        if not 0 <= self.replica < self.replicas:
            raise PlanError(f"replica {self.replica} of {self.replicas}: expected one of them")
        if not len(self.layers) == len(self.recompute) == len(self.orders):
            raise PlanError(
                f"{len(self.layers)} stages have layers, {len(self.recompute)} have recompute "
                f"choices, {len(self.orders)} have ops; expected the same number"
            )
        for stage, (layers, choices) in enumerate(zip(self.layers, self.recompute, strict=True)):
            if len(choices) != len(self.chunks):
                raise PlanError(
                    f"recompute {stage}: {len(choices)} choices for {len(self.chunks)} chunks"
                )
            for choice in dict.fromkeys(choices):  # many chunks share few choices
                if len(choice) != layers or not set(choice) <= set(MODES):
                    text = shortened(format_recompute(choice), 60)
                    raise PlanError(
                        f"recompute {stage}, chunk {choices.index(choice)}: {text} covers "
                        f"{len(choice)} layers; stage {stage} has {layers}"
                    )
        for chunk_index, chunk in enumerate(self.chunks):
            for span in chunk.spans:
                if span.document >= len(self.documents):
                    raise PlanError(
                        f"chunk {chunk_index}: document {span.document}; "
                        f"there are {len(self.documents)}"
                    )
                if span.stop > self.documents[span.document]:
                    raise PlanError(
                        f"chunk {chunk_index}: {span} exceeds document {span.document} "
                        f"of {self.documents[span.document]} inputs"
                    )
                if span.local and span.tokens < self.documents[span.document]:
                    raise PlanError(
                        f"chunk {chunk_index}: {span} is a slice of document {span.document} of "
                        f"{self.documents[span.document]} inputs; only a whole document is local "
                        "to a rank"
                    )
        for stage, order in enumerate(self.orders):
            for op in order:
                if op.chunk >= len(self.chunks):
                    raise PlanError(
                        f"stage {stage}: {op} names chunk {op.chunk}; there are {len(self.chunks)}"
                    )
        self._check_placement()
        object.__setattr__(self, "prefixes", checked_prefixes(self.documents, self.prefixes))
        if self.predicted is not None and len(self.predicted.peak_gib) != self.ranks:
            what = "ranks" if self.shares_ranks else "stages"
            raise PlanError(
                f"predicted: {len(self.predicted.peak_gib)} peaks for {self.ranks} {what}"
            )

    def _check_placement(self) -> None:
        if self.place == tuple(range(self.stages)):
            object.__setattr__(self, "place", ())
        if self.place and len(self.place) != self.stages:
            raise PlanError(
                f"place: {len(self.place)} ranks for {self.stages} stages; expected one for each"
            )
        if set(self.rank_of) != set(range(self.ranks)):
            raise PlanError(
                f"place {' '.join(map(str, self.place))}: expected ranks from 0 on, each with at "
                "least one stage"
            )
        if self.shares_ranks and not self.turns:
            object.__setattr__(self, "turns", ((),) * self.ranks)
        if len(self.turns) != (self.ranks if self.shares_ranks else 0):
            raise PlanError(
                f"{len(self.turns)} ranks have turns; expected all {self.ranks} where a rank has "
                "several stages, else none"
            )
        for rank, turns in enumerate(self.turns):
            for stage in dict.fromkeys((*turns, *self.stages_of(rank))):
                if not (0 <= stage < self.stages and self.rank_of[stage] == rank):
                    here = " ".join(map(str, self.stages_of(rank)))
                    raise PlanError(f"rank {rank} runs ops of stage {stage}; it has stages {here}")
                if turns.count(stage) != len(self.orders[stage]):
                    raise PlanError(
                        f"rank {rank} runs {turns.count(stage)} ops of stage {stage}, which has "
                        f"{len(self.orders[stage])}"
                    )

    @property
    def stages(self) -> int:
        """Number of stages of the model."""
        return len(self.layers)

    @property
    def placement(self) -> Placement:
        """Rank of each stage, as a :class:`Placement`."""
        return Placement(self.rank_of)

    @property
    def rank_of(self) -> tuple[int, ...]:
        """Rank of each stage."""
        return self.place or tuple(range(self.stages))

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks; each runs one op at a time."""
        return self.placement.ranks

    @property
    def shares_ranks(self) -> bool:
        """Whether a rank computes several stages."""
        return self.placement.shares_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on ``rank``, in order."""
        return self.placement.stages_of(rank)

    @property
    def rank_orders(self) -> tuple[tuple[tuple[int, Op], ...], ...]:
        """Ops of every rank in execution order, as (stage, op)."""
        if self.shares_ranks:
            coming = [iter(order) for order in self.orders]
            return tuple(
                tuple((stage, next(coming[stage])) for stage in turns) for turns in self.turns
            )
        return tuple(
            tuple((stage, op) for op in self.orders[stage])
            for stage in sorted(range(self.stages), key=self.rank_of.__getitem__)
        )

    def rank_name(self, rank: int) -> str:
        """Return the name of ``rank``: ``rank 2``, or ``stage 2`` if every rank has one stage."""
        return f"rank {rank}" if self.shares_ranks else f"stage {self.rank_of.index(rank)}"

    def op_name(self, stage: int, op: Op) -> str:
        """Return the name of an op: ``F5``, or ``F2.5`` if a rank has several stages."""
        return str(StageOp(stage, op) if self.shares_ranks else op)

    @property
    def tokens(self) -> int:
        """Number of tokens in all documents of this replica."""
        return sum(self.documents)

    def prefix_of(self, document: int) -> tuple[Span, ...]:
        """Return the spans of other documents that precede ``document``, in order of position."""
        spans: list[Span] = []
        while self.prefixes and (prefix := self.prefixes[document]) is not None:
            spans.append(prefix)
            document = prefix.document
        return tuple(reversed(spans))

    def offset(self, document: int) -> int:
        """Return the position of the first token of ``document``."""
        return sum(prefix.tokens for prefix in self.prefix_of(document))

    def pairs(self, chunk: int) -> int:
        """Return the number of query-key pairs of a chunk's attention, with keys of prefixes."""
        spans = self.chunks[chunk].spans if self.prefixes else ()
        before = sum(self.offset(span.document) * span.tokens for span in spans)
        return self.chunks[chunk].pairs + before

    @property
    def forward_only(self) -> bool:
        """Whether no stage runs a backward, as in evaluation."""
        return self.kinds.isdisjoint(MAKE_GRADIENTS)

    @property
    def splits_backward(self) -> bool:
        """Whether a backward is split into I and W."""
        return Kind.WEIGHT in self.kinds

    @property
    def vocabulary_parallel(self) -> bool:
        """Whether the LM head is sharded over all stages, which run H (and G) of every chunk."""
        return not self.kinds.isdisjoint(OF_HEAD)

    @property
    def kinds(self) -> frozenset[Kind]:
        """Kinds of the ops of all stages."""
        if self._kinds is None:
            kinds = frozenset({op.kind for order in self.orders for op in order})
            object.__setattr__(self, "_kinds", kinds)
        return self._kinds

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical text, as 64 hexadecimal digits."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def __str__(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "plan v1"
        yield f"replica {self.replica} of {self.replicas}"
        yield f"documents {' '.join(map(str, self.documents)) or EMPTY}"
        yield from prefix_lines(self.prefixes).values()
        yield f"layers {' '.join(map(str, self.layers))}"
        if self.place:
            yield f"place {' '.join(map(str, self.place))}"
        for index, chunk in enumerate(self.chunks):
            yield f"chunk {index}: {chunk}"
        for stage, choices in enumerate(self.recompute):
            texts = {choice: format_recompute(choice) for choice in dict.fromkeys(choices)}
            yield f"recompute {stage}: {' '.join(texts[choice] for choice in choices)}"
        if self.shares_ranks:
            for rank, ran in enumerate(self.rank_orders):
                ops = " ".join(str(StageOp(stage, op)) for stage, op in ran)
                yield f"rank {rank}: {ops}".rstrip()
        else:
            for stage, order in enumerate(self.orders):
                yield f"stage {stage}: {' '.join(map(str, order))}".rstrip()
        if self.predicted is not None:
            yield str(self.predicted)

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Return the plan that ``text`` describes.

        Raises:
            PlanError: a line is invalid or missing, there are too many lines, or they contradict
                each other.
        """
        return cls.of_lines(enumerate(lines_of(text), 1))

    @classmethod
    def of_lines(cls, lines: Iterable[tuple[int, str]]) -> "Plan":
        """Return the plan described by ``lines``, each with its line number in the file."""
        return _Reader(lines).plan()


def lines_of(text: str) -> list[str]:
    """Split the text of a file at newline characters.

    ``str.splitlines`` would also split at separators that editors do not show as line ends.

    Raises:
        PlanError: the text has more than MOST_LINES lines.
    """
    if (count := text.count("\n")) > MOST_LINES:
        raise PlanError(f"{count} lines; expected at most {MOST_LINES} of a plan or a step")
    return text.split("\n")


def prefix_lines(prefixes: Prefixes) -> dict[int, str]:
    """Return the ``prefix`` line of every document that has a prefix, by document."""
    return {d: f"prefix {d}: {span}" for d, span in enumerate(prefixes) if span is not None}


def offsets_of(prefixes: Prefixes) -> list[int]:
    """Return the position of the first token of every document."""
    offset: dict[int, int] = {}
    for number in range(len(prefixes)):
        path: list[tuple[int, Span]] = []
        at = number
        while at not in offset and (prefix := prefixes[at]) is not None:
            path.append((at, prefix))
            at = prefix.document
        offset.setdefault(at, 0)
        for document, prefix in reversed(path):
            offset[document] = offset[prefix.document] + prefix.stop
    return [offset[number] for number in range(len(prefixes))]


def checked_prefixes(documents: tuple[int, ...], prefixes: Prefixes) -> Prefixes:
    """Return ``prefixes``, or () if no document has one.

    Raises:
        PlanError: ``prefixes`` has another length; a prefix is not the start of another document; a
            document continues itself; or there are more than MOST_CONTINUED pairs of a document
            and another that it continues, directly or through others.
    """
    if all(prefix is None for prefix in prefixes):
        return ()
    if len(prefixes) != len(documents):
        raise PlanError(f"{len(prefixes)} prefixes for {len(documents)} documents")
    for number, prefix in enumerate(prefixes):
        _check_prefix(documents, number, prefix)
    depth: dict[int, int] = {}  # number of documents that a document continues, directly or not
    for number, prefix in enumerate(prefixes):
        path = {number: prefix}
        at = prefix
        while at is not None and at.document not in depth:
            if at.document in path:
                line = prefix_lines(prefixes)[number]
                raise PlanError(f"{line}: document {at.document} continues itself")
            path[at.document] = prefixes[at.document]
            at = prefixes[at.document]
        above = -1 if at is None else depth[at.document]
        depth.update((document, above + n) for n, document in enumerate(reversed(path), 1))
    if (continued := sum(depth.values())) > MOST_CONTINUED:
        raise PlanError(
            f"prefix: documents continue others {continued} times in all, directly or through each "
            f"other; expected at most {MOST_CONTINUED}"
        )
    return prefixes


def _check_prefix(documents: tuple[int, ...], number: int, prefix: Span | None) -> None:
    if prefix is None:
        return
    line = f"prefix {number}: {prefix}"
    if prefix.document >= len(documents):
        raise PlanError(f"{line}: document {prefix.document}; there are {len(documents)}")
    if prefix.start or prefix.stop > documents[prefix.document] or prefix.local:
        raise PlanError(
            f"{line}: expected inputs of document {prefix.document} from the first to one of its "
            f"{documents[prefix.document]}, on all ranks"
        )


Line = tuple[int, list[str]]  # line number and words


class _Reader:
    """Parser of the lines of a plan in their fixed order; errors quote the invalid line."""

    def __init__(self, lines: Iterable[tuple[int, str]]):
        every = ((number, line.split("#")[0].split()) for number, line in lines)
        self.rest = ((number, words) for number, words in every if words)
        self.known_choices: dict[str, str] = {}
        self.choice_layers = 0  # layers in ``known_choices``
        self.last: Line | None = None  # the line that was read last
        self.line: Line | None = next(self.rest, None)  # the next line

    def plan(self) -> Plan:
        self.expect(["plan", "v1"])
        replica, replicas = self.replica()
        documents = self.numbers("documents", none=EMPTY)
        prefixes = self.prefixes(documents)
        layers = self.numbers("layers")
        if max(layers) > MOST_LAYERS:  # before a choice with that many modes is created
            self.fail(f"expected at most {MOST_LAYERS} layers on a stage", self.last)
        place = self.place(len(layers))
        chunks = tuple(self.indexed("chunk", Chunk.parse))
        recompute = tuple(self.indexed("recompute", partial(self.choices, len(chunks))))
        orders, turns = self.orders(place)
        predicted = self.predicted()
        if self.line is not None:
            self.fail(
                "did not expect this line here; the order is plan, replica, documents, prefix, "
                f"layers, place, chunk, recompute, {'rank' if turns else 'stage'}, predicted"
            )
        if not recompute:
            recompute = tuple((KEEP * count,) * len(chunks) for count in layers)
        return Plan(
            documents,
            layers,
            chunks,
            recompute,
            orders,
            replica,
            replicas,
            predicted,
            place,
            turns,
            prefixes,
        )

    def fail(self, what: str, line: Line | None = None) -> NoReturn:
        line = line or self.line
        if line is None:
            raise PlanError(f"plan ends too early: {what}")
        number, words = line
        raise PlanError(f"plan line {number} ({quoted(' '.join(words))}): {what}")

    def words(self, key: str) -> list[str] | None:
        """Read the next line if it begins with ``key``; return the words after ``key``, or None."""
        if self.line is None or self.line[1][0] != key:
            return None
        self.last, self.line = self.line, next(self.rest, None)
        return self.last[1][1:]

    def expect(self, words: list[str]) -> None:
        if self.line is None or self.line[1] != words:
            self.fail(f"expected {' '.join(words)!r}")
        self.words(words[0])

    def number(self, word: str) -> int:
        if _NUMBER.fullmatch(word) is None:
            self.fail(f"{quoted(word)} is not a whole number", self.last)
        return int(word)

    def replica(self) -> tuple[int, int]:
        words = self.words("replica")
        if words is None:
            return 0, 1
        if len(words) != 3 or words[1] != "of":
            self.fail("expected 'replica N of M'", self.last)
        return self.number(words[0]), self.number(words[2])

    def numbers(self, key: str, none: str = "") -> tuple[int, ...]:
        words = self.words(key)
        if none and words == [none]:
            return ()
        if not words:
            here = self.line if words is None else self.last
            self.fail(f"expected '{key}' and whole numbers", here)
        return tuple(map(self.number, words))

    def choices(self, chunks: int, words: list[str]) -> tuple[str, ...]:
        """Return a stage's recompute modes for every chunk; equal words give the same object."""
        if len(words) != chunks:
            raise PlanError(f"{len(words)} choices for {chunks} chunks")
        for word in dict.fromkeys(words):
            if word not in self.known_choices:
                self.known_choices[word] = parse_recompute(word)
                self.choice_layers += len(self.known_choices[word])
            if self.choice_layers > MOST_CHOICE_LAYERS:
                raise PlanError(
                    f"more than {MOST_CHOICE_LAYERS} layers in recompute choices that differ"
                )
        return tuple(self.known_choices[word] for word in words)

    def prefixes(self, documents: tuple[int, ...]) -> Prefixes:
        prefixes: list[Span | None] = [None] * len(documents)
        last = -1
        while (words := self.words("prefix")) is not None:
            number = words[0].removesuffix(":") if words else ""
            if len(words) != 2 or words[0] == number or _NUMBER.fullmatch(number) is None:
                self.fail("expected 'prefix DOCUMENT: SPAN', as in prefix 3: 0[0:4000]", self.last)
            if not last < int(number) < len(documents):
                self.fail(
                    f"expected a document after {last}, of {len(documents)}"
                    if last >= 0
                    else f"document {number}; there are {len(documents)}",
                    self.last,
                )
            last = int(number)
            try:
                prefixes[last] = Span.parse(words[1])
                _check_prefix(documents, last, prefixes[last])
            except PlanError as error:
                self.fail(str(error), self.last)
        return tuple(prefixes) if last >= 0 else ()

    def place(self, stages: int) -> tuple[int, ...]:
        words = self.words("place")
        if words is None:
            return ()
        place = tuple(map(self.number, words))
        if len(place) != stages:
            self.fail(f"{len(place)} ranks; expected one for each of {stages} stages", self.last)
        if place == tuple(range(stages)):
            self.fail("stage i is on rank i without this line: remove it", self.last)
        missing = set(range(max(place))) - set(place)
        if missing:
            self.fail(f"rank {min(missing)} has no stage; expected at least one", self.last)
        return place

    def orders(self, place: tuple[int, ...]) -> tuple[Orders, Turns]:
        """Return the ops of every stage in order, and ``Plan.turns``."""
        ranks = 1 + max(place, default=0)
        if ranks >= len(place):
            return tuple(self.indexed("stage", lambda words: tuple(map(Op.parse, words)))), ()
        orders: list[list[Op]] = [[] for _ in place]

        def parse(words: list[str]) -> tuple[int, ...]:
            ops = tuple(map(StageOp.parse, words))
            for op in ops:
                if op.stage >= len(place):
                    raise PlanError(f"{op} names stage {op.stage}; there are {len(place)}")
                orders[op.stage].append(op.op)
            return tuple(op.stage for op in ops)

        turns = tuple(self.indexed("rank", parse))
        if len(turns) != ranks:
            self.fail(f"expected 'rank {len(turns)}:', as a rank has several stages")
        return tuple(map(tuple, orders)), turns

    def indexed[T](self, key: str, parse: Callable[[list[str]], T]) -> Iterator[T]:
        index = 0
        while (words := self.words(key)) is not None:
            if not words or words[0] != f"{index}:":
                self.fail(f"expected '{key} {index}:'", self.last)
            try:
                yield parse(words[1:])
            except PlanError as error:
                self.fail(str(error), self.last)
            index += 1

    def predicted(self) -> Prediction | None:
        words = self.words("predicted")
        if words is None:
            return None
        if (
            len(words) < 6
            or words[0] != "seconds"
            or words[2] != "peak_gib"
            or words[-2] != "planner"
        ):
            self.fail("expected 'predicted seconds S peak_gib G ... planner NAME'", self.last)
        for word in (words[1], *words[3:-2]):
            if _DECIMAL.fullmatch(word) is None:
                self.fail(f"{quoted(word)} is not a number", self.last)
        try:
            return Prediction(float(words[1]), tuple(map(float, words[3:-2])), words[-1])
        except PlanError as error:
            self.fail(str(error), self.last)
