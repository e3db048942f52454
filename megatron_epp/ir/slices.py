"""How the slices of cut documents tie chunks together."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.ir.chunk import Chunk
from megatron_epp.ir.errors import PlanError
from megatron_epp.ir.plan import Plan
from megatron_epp.ir.rules import Relation, SlicePosition
from megatron_epp.ir.span import Span


@dataclass(frozen=True, slots=True)
class Slices:
    """For every chunk: its cut document, and the chunks with the slices before and after.

    document[c]   the cut document of which chunk c holds a slice, or -1
    earlier[c]    the chunk with the slice before, or -1
    later[c]      the chunk with the slice after, or -1
    """

    document: tuple[int, ...]
    earlier: tuple[int, ...]
    later: tuple[int, ...]

    def related(self, chunk: int, relation: Relation) -> int:
        """The chunk that stands in ``relation`` to ``chunk``, or -1."""
        match relation:
            case Relation.SAME:
                return chunk
            case Relation.EARLIER:
                return self.earlier[chunk]
            case Relation.LATER:
                return self.later[chunk]

    def all_related(self, chunk: int, relation: Relation) -> tuple[int, ...]:
        """Every chunk that stands in ``relation`` to ``chunk``."""
        related = self.related(chunk, relation)
        return (related,) if related >= 0 else ()

    def holds(self, chunk: int, place: SlicePosition) -> bool:
        """Whether a row for ``place`` speaks of ``chunk``."""
        match place:
            case SlicePosition.ANY:
                return True
            case SlicePosition.FIRST:
                return self.document[chunk] >= 0 and self.earlier[chunk] < 0
            case SlicePosition.LAST:
                return self.document[chunk] >= 0 and self.later[chunk] < 0


def slices_of(plan: Plan) -> Slices:
    """The slices of ``plan``, worked out once and kept on the value; see :func:`slices_in`."""
    if plan._slices is None:
        object.__setattr__(plan, "_slices", slices_in(plan.documents, plan.chunks))
    return plan._slices


def slices_in(documents: Sequence[int], chunks: Sequence[Chunk]) -> Slices:
    """How ``chunks`` cut ``documents``; a :class:`PlanError` where a token is computed twice or
    never, or where a chunk holds slices of two cut documents (their K/V would have to live
    together).
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
    return Slices(tuple(document), tuple(earlier), tuple(later))
