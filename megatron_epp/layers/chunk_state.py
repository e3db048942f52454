"""State of a chunk on its way through a stage's layers."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_epp.ir import ALL_RANKS, Plan, Slices, Span
from megatron_epp.runtime.host_store import HostStore
from megatron_epp.runtime.kv_store import Store


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, stop) of a chunk's tensors hold ``span``.

    ``cut``: the span is a slice of a cut document; ``last``: the last one, so nobody attends to
    its K and V later.
    """

    start: int
    stop: int
    span: Span
    cut: bool
    last: bool


@dataclass(slots=True)
class ChunkState:
    """Travels with a chunk through every layer of a stage, in forward and in recomputation.

    rows        where each span lies that is spread over context-parallel ranks; ``tokens`` counts
                all rows that are, padding behind the spans included
    recompute   one letter per layer of this stage
    store       the K/V of cut documents
    host        what offloaded layers saved; None where there is none
    router_stats   what routers have seen of its documents, in training with experts
                (experts.router_stats.RouterStats, which reads this)
    local       of the documents that this rank computes alone: their rows are behind its share of
                those spread; None where no rank has any
    local_documents   those of all ranks, in the order of the chunk
    repeated    layers in front of a repeated one's run, since the run that it was installed for
    """

    chunk: int
    rows: tuple[Rows, ...]
    tokens: int
    recompute: str
    store: Store
    training: bool = True
    host: HostStore | None = None
    router_stats: Any = None
    local: "ChunkState | None" = None
    local_documents: tuple[int, ...] = ()
    repeated: int = 0
    _made: dict[str, Any] = field(default_factory=dict, repr=False)

    def layer(self, installed: int) -> int:
        """Number in the stage of the layer that runs: of most the one that they were installed
        as."""
        return installed + self.repeated

    def again(self, layers: int) -> "ChunkState":
        """State of the run of a repeated layer so many layers behind the one it was installed
        for. What is made once for the chunk stays its own."""
        return replace(self, repeated=layers)

    @property
    def used(self) -> int:
        """Rows in front of the padding; none of an empty chunk."""
        return self.rows[-1].stop if self.rows else 0

    def once[T](self, name: str, make: Callable[[], T]) -> T:
        """``make()`` of the first layer that asks for ``name``; all others get the same."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def chunk_rows(plan: Plan, slices: Slices, chunk: int, rank: int = ALL_RANKS) -> tuple[Rows, ...]:
    """The rows of ``chunk``: its spans one behind the other, those that all context-parallel ranks
    share, or those local to ``rank``."""
    rows, start = [], 0
    for span in plan.chunks[chunk].spans:
        if span.rank != rank:
            continue
        cut = span.tokens < plan.documents[span.document]
        last = span.stop == plan.documents[span.document]
        rows.append(Rows(start, start + span.tokens, span, cut, last))
        start += span.tokens
    return tuple(rows)


def context_tokens(plan: Plan, slices: Slices) -> dict[int, int]:
    """For every cut document, the inputs that a later slice attends to: all but its last slice."""
    contexts = {}
    for chunk, document in enumerate(slices.document):
        if document >= 0 and slices.later[chunk] < 0:
            spans: Sequence[Span] = plan.chunks[chunk].spans
            contexts[document] = next(s.start for s in spans if s.document == document)
    return contexts


def store_for(plan: Plan, slices: Slices, stores_last_slice: bool) -> Store:
    """An empty store for an iteration; ``stores_last_slice``: with room for last slices, too."""
    contexts = context_tokens(plan, slices)
    kept = {d: plan.documents[d] for d in contexts} if stores_last_slice else contexts
    return Store(contexts, kept, borders_of(plan, contexts))


def borders_of(plan: Plan, documents: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Ends of the slices, but the last, of each of the cut ``documents``."""
    stops: dict[int, list[int]] = {document: [] for document in documents}
    for chunk in plan.chunks:
        for span in chunk.spans:
            if span.document in stops and span.stop < plan.documents[span.document]:
                stops[span.document].append(span.stop)
    return {document: tuple(sorted(found)) for document, found in stops.items()}
