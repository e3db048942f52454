"""Links between chunks with slices of the same document, or with a document and its prefix."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_epp.ir.chunk import Chunk
from megatron_epp.ir.errors import PlanError
from megatron_epp.ir.plan import Plan, Prefixes
from megatron_epp.ir.rules import Relation
from megatron_epp.ir.span import Span


@dataclass(frozen=True, slots=True)
class CachedDocument:
    """Document with cached K and V: it is cut into slices, or is the prefix of other documents.

    Attributes:
        document: number of the document.
        first: chunk with the first slice of the document.
        readers: chunks that attend to the cached K and V: first those with later slices of the
            document, in order, then those of documents that continue it, directly or through
            another document. Chunk ``first`` may be among the latter.
        boundaries: positions in the document at which later slices, or documents that continue it,
            begin.
    """

    document: int
    first: int
    readers: tuple[int, ...]
    boundaries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slices:
    """Slice of a cut document in every chunk, and the chunks with the slices before and after it.

    Attributes:
        document: ``document[c]`` is the document whose slice is in chunk c; -1 without a slice.
        earlier: ``earlier[c]`` is the chunk with the preceding slice of the same document, or with
            the end of the document's prefix; -1 if there is none.
        later: ``later[c]`` is the chunk with the next slice of the same document; -1 if none.
        children: ``children[c]`` lists the chunks whose ``earlier`` is c. There are several if
            several documents continue chunk c, so the chunks form a forest.
        kept: documents whose K and V are cached, by ascending number.
    """

    document: tuple[int, ...]
    earlier: tuple[int, ...]
    later: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    kept: tuple[CachedDocument, ...]
    _boundaries: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def boundaries(self) -> Mapping[int, tuple[int, ...]]:
        """Boundaries (see CachedDocument) of each cached document, by number of the document."""
        if self.kept and not self._boundaries:
            self._boundaries.update((each.document, each.boundaries) for each in self.kept)
        return self._boundaries

    def all_related(self, chunk: int, relation: Relation) -> tuple[int, ...]:
        """Return every chunk in ``relation`` to ``chunk``."""
        match relation:
            case Relation.SAME:
                return (chunk,)
            case Relation.EARLIER:
                return (self.earlier[chunk],) if self.earlier[chunk] >= 0 else ()
            case Relation.LATER:
                return self.children[chunk]


def slices_of(plan: Plan) -> Slices:
    """Return the slices of ``plan``, as from :func:`slices_in`; the plan caches the result."""
    if plan._slices is None:
        slices = slices_in(plan.documents, plan.chunks, plan.prefixes)
        object.__setattr__(plan, "_slices", slices)
    return plan._slices


def slices_in(documents: Sequence[int], chunks: Sequence[Chunk], prefixes: Prefixes = ()) -> Slices:
    """Return the slices into which ``chunks`` cut ``documents``.

    Args:
        documents: number of tokens of each document.
        chunks: chunks of the plan.
        prefixes: for each document, the span of another document that it continues, or None; empty
            if no document has a prefix.

    Raises:
        PlanError: a token is computed twice or never; a chunk holds slices of two cut documents; a
            prefix ends inside a span; a single context-parallel rank computes a document with a
            prefix, or the document that it continues; a document stands before its prefix in a
            chunk; or a chunk continues several chunks or itself.
    """
    places: list[list[tuple[Span, int]]] = [[] for _ in documents]
    for index, chunk in enumerate(chunks):
        for span in chunk.spans:
            places[span.document].append((span, index))
    document = [-1] * len(chunks)
    earlier = [-1] * len(chunks)
    later = [-1] * len(chunks)
    for number, spans in enumerate(places):
        spans.sort()
        reached = 0
        for span, index in spans:
            if span.start != reached:
                what = "never" if span.start > reached else "twice"
                start, stop = sorted((reached, span.start))
                raise PlanError(
                    f"document {number}: inputs [{start}:{stop}] are computed {what} "
                    f"(chunk {index} holds {span})"
                )
            reached = span.stop
        if reached != documents[number]:
            raise PlanError(
                f"document {number}: inputs [{reached}:{documents[number]}] are never computed"
            )
        if len(spans) == 1:
            continue
        for (_, before), (_, after) in itertools.pairwise(spans):
            earlier[after], later[before] = before, after
        for _, index in spans:
            if document[index] >= 0:
                raise PlanError(
                    f"chunk {index}: holds slices of documents {document[index]} and {number}; "
                    "expected at most one cut document in a chunk"
                )
            document[index] = number
    if prefixes:
        _tie_branches(chunks, prefixes, places, earlier)
    children: list[list[int]] = [[] for _ in chunks]
    for index, before in enumerate(earlier):
        if before >= 0:
            children[before].append(index)
    kept = _kept(prefixes, places)
    return Slices(tuple(document), tuple(earlier), tuple(later), tuple(map(tuple, children)), kept)


Places = Sequence[Sequence[tuple[Span, int]]]  # (span, chunk) of every document


def _tie_branches(
    chunks: Sequence[Chunk], prefixes: Prefixes, places: Places, earlier: list[int]
) -> None:
    """Set ``earlier`` of each branch's first chunk to the chunk in which its prefix ends."""
    for number, prefix in enumerate(prefixes):
        if prefix is None:
            continue
        parent = next((p for p in places[prefix.document] if p[0].stop == prefix.stop), None)
        line = f"prefix {number}: {prefix}"
        if parent is None:
            stops = ", ".join(str(span.stop) for span, _ in places[prefix.document])
            raise PlanError(
                f"{line}: document {prefix.document} has no boundary there; expected the end of "
                f"one of its spans ({stops})"
            )
        (span, before), (own, index) = parent, places[number][0]
        for one in (span, own):
            if one.local:
                raise PlanError(f"{line}: {one} is local to a rank; expected spread documents")
        if before == index:
            spans = chunks[index].spans
            if spans.index(span) > spans.index(own):
                raise PlanError(
                    f"chunk {index}: {own} continues {span}, which comes after it; expected it in"
                    " front"
                )
        elif earlier[index] not in (-1, before):
            raise PlanError(
                f"chunk {index}: continues slices of chunks {earlier[index]} and {before}; expected"
                " one chunk before it"
            )
        else:
            earlier[index] = before
    known: set[int] = set()  # chunks whose ancestors are known to end in a root
    for index in range(len(chunks)):
        path, at = {index}, earlier[index]
        while at >= 0 and at not in path and at not in known:
            path.add(at)
            at = earlier[at]
        if at in path:
            raise PlanError(
                f"chunk {at}: continues chunk {earlier[at]}, which continues it; expected "
                "chunks of which one comes first"
            )
        known |= path


def _kept(prefixes: Prefixes, places: Places) -> tuple[CachedDocument, ...]:
    readers = [[index for _, index in spans[1:]] for spans in places]
    boundaries = [{span.stop for span, _ in spans[:-1]} for spans in places]
    for number, prefix in enumerate(prefixes):
        own = dict.fromkeys(index for _, index in places[number])
        if prefix is not None:
            boundaries[prefix.document].add(prefix.stop)
        while prefix is not None:
            readers[prefix.document] += own
            prefix = prefixes[prefix.document]
    return tuple(
        CachedDocument(
            number,
            places[number][0][1],
            tuple(dict.fromkeys(slices)),
            tuple(sorted(boundaries[number])),
        )
        for number, slices in enumerate(readers)
        if slices
    )
