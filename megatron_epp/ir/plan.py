"""The plan: a frozen value with a text form and a digest.

    plan v1
    replica 0 of 1
    documents 9000 1500 900              # inputs of document 0, 1, 2 of this replica's part
    layers 4 4                           # transformer layers of stage 0, 1
    chunk 0: 0[0:5000]                   # spans are half-open
    chunk 1: 0[5000:9000] 1[0:1500]      # hybrid: the tail of document 0 and all of document 1
    chunk 2: 2[0:900]
    recompute 0: 3f1k 4k 2c2k            # per chunk, run-length over the stage's layers: k keeps
    recompute 1: 4k 4k 4k
    stage 0: F0 F1 F2 B1 B0 B2
    stage 1: F0 F1 B1 B0 F2 B2
    predicted seconds 1.234 peak_gib 10.5 9.8 planner epp

``replica``, ``recompute`` and ``predicted`` lines may be left out in a plan written by hand: they
default to 0 of 1, keep everything, and nothing predicted. Lines stand in this order. A plan with
vocabulary parallelism has ``H0`` and ``G0`` in its orders, of every chunk on every stage. What the
letters of ``recompute`` mean is said in :mod:`megatron_epp.ir.recompute`. A chunk may hold no span
(``chunk 3: -``): replicas in lockstep have as many chunks each (:mod:`megatron_epp.ir.step`), and a
replica without documents (``documents -``) has one such chunk, by which it takes part in all that
replicas do together.
``2[0:900]@1``: context-parallel rank 1 computes document 2 alone (:mod:`megatron_epp.ir.span`).

``prefix 3: 0[0:4000]``, behind ``documents``: document 3 continues these inputs of document 0, as
several may, which are computed once. Its own inputs count from 0, its positions from 4000; where
the prefix ends a span of document 0 ends (:mod:`megatron_epp.ir.slices`).

Stages are parts of the model; stage i lies on rank i of the pipeline unless a line behind
``layers`` says otherwise. Where a rank has several stages, orders are those of ranks, and their ops
name their stage: ``F3.0`` is F of stage 3 on chunk 0. ``peak_gib`` is that of every rank.

    layers 2 2 2 2
    place 0 1 1 0                        # the rank of stage 0, 1, 2, 3: a V
    ...
    rank 0: F0.0 F3.0 B3.0 B0.0
    rank 1: F1.0 F2.0 B2.0 B1.0
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
from megatron_epp.ir.recompute import (
    KEEP,
    MODES,
    MOST_LAYERS,
    format_recompute,
    parse_recompute,
)
from megatron_epp.ir.span import NUMBER, Span

# Far above any plan, and so that a small file cannot ask for minutes or gigabytes.
MOST_LINES = 2_000_000
MOST_CHOICE_LAYERS = 10_000_000  # of recompute choices that differ
MOST_CONTINUED = 1_000_000  # pairs of a document and one that it continues, directly or not

_NUMBER = re.compile(NUMBER)
# As Python prints floats: 16 digits before the point, 20 behind it (0.00012345678901234567).
_DECIMAL = re.compile(r"[0-9]{1,16}(\.[0-9]{1,20})?(e[+-]?[0-9]{1,3})?")
Orders = tuple[tuple[Op, ...], ...]
Turns = tuple[tuple[int, ...], ...]
Prefixes = tuple[Span | None, ...]  # of every document: what it continues
_PLANNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")


@dataclass(frozen=True, slots=True)
class Prediction:
    """The planner's promise: the iteration's time, and the peak of every rank."""

    seconds: float
    peak_gib: tuple[float, ...]  # by the memory budget's measure
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
    """Chunks, their order on every stage, and what each stage keeps of each chunk from F to B.

    documents[d]      inputs of document d of this replica's part of the batch
    layers[s]         transformer layers of stage s
    chunks[c]         spans of chunk c
    recompute[s][c]   one letter per layer of stage s: what backward recomputes, or what lies in the
                      host's memory meanwhile (ir.recompute)
    orders[s]         ops of stage s in the order they run
    place[s]          the rank on which stage s lies; () where stage i lies on rank i
    turns[r]          the stage of every op of rank r in the order they run; () where every rank has
                      one stage
    prefixes[d]       inputs of another document that document d continues, from its first on; None:
                      it continues none. () where no document does

    The value is well-formed (indices and sizes fit); that it computes every token once and never
    deadlocks is what :func:`megatron_epp.ir.check.check` proves.
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
    # Pure functions of the fields above, kept by whoever asks first (ir.slices; kinds).
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
            for choice in dict.fromkeys(choices):  # many chunks, few choices
                if len(choice) != layers or not set(choice) <= set(MODES):
                    text = shortened(format_recompute(choice), 60)
                    raise PlanError(
                        f"recompute {stage}, chunk {choices.index(choice)}: {text} speaks of "
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
                        f"chunk {chunk_index}: {span} ends behind document {span.document} "
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
        """Parts of the model, one behind the other."""
        return len(self.layers)

    @property
    def placement(self) -> Placement:
        return Placement(self.rank_of)

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The rank on which each stage lies."""
        return self.place or tuple(range(self.stages))

    @property
    def ranks(self) -> int:
        """Pipeline ranks: places that compute one op at a time."""
        return self.placement.ranks

    @property
    def shares_ranks(self) -> bool:
        """Whether a rank computes several stages."""
        return self.placement.shares_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return self.placement.stages_of(rank)

    @property
    def rank_orders(self) -> tuple[tuple[tuple[int, Op], ...], ...]:
        """(stage, op) of every rank, in the order they run."""
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
        """``rank 2``; ``stage 2`` where every rank has one stage."""
        return f"rank {rank}" if self.shares_ranks else f"stage {self.rank_of.index(rank)}"

    def op_name(self, stage: int, op: Op) -> str:
        """``F5``; ``F2.5`` where a rank has several stages."""
        return str(StageOp(stage, op) if self.shares_ranks else op)

    @property
    def tokens(self) -> int:
        return sum(self.documents)

    def prefix_of(self, document: int) -> tuple[Span, ...]:
        """Inputs of other documents in front of those of ``document``, in the order of their
        positions."""
        spans: list[Span] = []
        while self.prefixes and (prefix := self.prefixes[document]) is not None:
            spans.append(prefix)
            document = prefix.document
        return tuple(reversed(spans))

    def offset(self, document: int) -> int:
        """Position of the first input of ``document``."""
        return sum(prefix.tokens for prefix in self.prefix_of(document))

    def pairs(self, chunk: int) -> int:
        """Query-key pairs of a chunk's attention, those with inputs of other documents that its own
        continue included."""
        spans = self.chunks[chunk].spans if self.prefixes else ()
        before = sum(self.offset(span.document) * span.tokens for span in spans)
        return self.chunks[chunk].pairs + before

    @property
    def forward_only(self) -> bool:
        """Whether no stage runs a backward: a plan for evaluation."""
        return self.kinds.isdisjoint(MAKE_GRADIENTS)

    @property
    def splits_backward(self) -> bool:
        return Kind.WEIGHT in self.kinds

    @property
    def vocabulary_parallel(self) -> bool:
        """Whether the output layer is cut over all stages: they run H (and G) of every chunk."""
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
        """The plan that ``text`` describes; a :class:`PlanError` names the line that is bad."""
        return cls.of_lines(enumerate(lines_of(text), 1))

    @classmethod
    def of_lines(cls, lines: Iterable[tuple[int, str]]) -> "Plan":
        """Return the plan that ``lines``, each with its number in the file, describe."""
        return _Reader(lines).plan()


def lines_of(text: str) -> list[str]:
    """Return the lines of a file; a :class:`PlanError` where there are more than any plan has.

    Not splitlines(): it also splits at separators that a person does not see as lines.
    """
    if (count := text.count("\n")) > MOST_LINES:
        raise PlanError(f"{count} lines; expected at most {MOST_LINES} of a plan or a step")
    return text.split("\n")


def prefix_lines(prefixes: Prefixes) -> dict[int, str]:
    """By document, the line that says what it continues."""
    return {d: f"prefix {d}: {span}" for d, span in enumerate(prefixes) if span is not None}


def checked_prefixes(documents: tuple[int, ...], prefixes: Prefixes) -> Prefixes:
    """``prefixes``, or () where no document has one. PlanError: one is no beginning of another
    document, or a document continues itself."""
    if all(prefix is None for prefix in prefixes):
        return ()
    if len(prefixes) != len(documents):
        raise PlanError(f"{len(prefixes)} prefixes for {len(documents)} documents")
    for number, prefix in enumerate(prefixes):
        _check_prefix(documents, number, prefix)
    depth: dict[int, int] = {}  # of a document: how many it continues, directly or not
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


Line = tuple[int, list[str]]  # its number, and its words


class _Reader:
    """Reads the lines of a plan in order; every error names its line."""

    def __init__(self, lines: Iterable[tuple[int, str]]):
        every = ((number, line.split("#")[0].split()) for number, line in lines)
        self.rest = ((number, words) for number, words in every if words)
        self.known_choices: dict[str, str] = {}
        self.choice_layers = 0  # of these
        self.last: Line | None = None  # the line that was read last
        self.line: Line | None = next(self.rest, None)  # the one that comes

    def plan(self) -> Plan:
        self.expect(["plan", "v1"])
        replica, replicas = self.replica()
        documents = self.numbers("documents", none=EMPTY)
        prefixes = self.prefixes(documents)
        layers = self.numbers("layers")
        if max(layers) > MOST_LAYERS:  # before a choice of that many letters is made
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
        """The next line's words behind ``key``, or None where the line has another key."""
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
            self.fail(f"{quoted(word)} is no whole number", self.last)
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
        """Return a stage's recompute choices, each text of all lines read once."""
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
                    f"expected a document behind {last}, of {len(documents)}"
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
            self.fail("stage i lies on rank i without this line: leave it out", self.last)
        missing = set(range(max(place))) - set(place)
        if missing:
            self.fail(f"rank {min(missing)} has no stage; expected at least one", self.last)
        return place

    def orders(self, place: tuple[int, ...]) -> tuple[Orders, Turns]:
        """The order of every stage; where a rank has several, those of ranks, taken apart."""
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
                self.fail(f"{quoted(word)} is no number", self.last)
        try:
            return Prediction(float(words[1]), tuple(map(float, words[3:-2])), words[-1])
        except PlanError as error:
            self.fail(str(error), self.last)
