"""State of a chunk on its way through a stage's layers."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_epp.ir import ALL_RANKS, Plan, Slices, Span
from megatron_epp.runtime.host_store import HostStore
from megatron_epp.runtime.kv_store import Store


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, stop) of a chunk's tensors hold ``span``.

    ``cut``: the span is a slice of a document whose K and V are kept, as it is cut or others
    continue it; ``last``: nobody attends to its K and V later.

    prefix   inputs of other documents in front of those of its own, in the order of positions
    """

    start: int
    stop: int
    span: Span
    cut: bool
    last: bool
    prefix: tuple[Span, ...] = ()

    @property
    def offset(self) -> int:
        """Position of its document's first input."""
        return sum(span.tokens for span in self.prefix)

    @property
    def context(self) -> tuple[tuple[int, int], ...]:
        """(document, inputs of it from its first on) of all that the span sees of other spans, in
        the order of positions."""
        others = [(span.document, span.stop) for span in self.prefix]
        own = [(self.span.document, self.span.start)] if self.span.start else []
        return (*others, *own)


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
    _cached: dict[str, Any] = field(default_factory=dict, repr=False)

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
        if name not in self._cached:
            self._cached[name] = make()
        return self._cached[name]


def chunk_rows(plan: Plan, slices: Slices, chunk: int, rank: int = ALL_RANKS) -> tuple[Rows, ...]:
    """The rows of ``chunk``: its spans one behind the other, those that all context-parallel ranks
    share, or those local to ``rank``."""
    rows, start = [], 0
    boundaries = slices.boundaries
    for span in plan.chunks[chunk].spans:
        if span.rank != rank:
            continue
        cut = span.document in boundaries
        last = not cut or span.stop > boundaries[span.document][-1]
        prefix = plan.prefix_of(span.document)
        rows.append(Rows(start, start + span.tokens, span, cut, last, prefix))
        start += span.tokens
    return tuple(rows)


def store_for(plan: Plan, slices: Slices, stores_last_slice: bool) -> Store:
    """An empty store for an iteration; ``stores_last_slice``: with room for last slices, too."""
    contexts = {document: boundaries[-1] for document, boundaries in slices.boundaries.items()}
    kept = {d: plan.documents[d] for d in contexts} if stores_last_slice else contexts
    readers: Counter[int] = Counter()
    followers: Counter[int] = Counter()
    if plan.prefixes:
        chunks = range(len(plan.chunks))
        every = [rows for c in chunks for rows in chunk_rows(plan, slices, c) if rows.context]
        readers.update(document for rows in every for document, _ in rows.context)
        followers.update(rows.context[-1][0] for rows in every)
    return Store(contexts, kept, slices.boundaries, readers, followers)


def let_go(state: ChunkState, layer: int) -> None:
    """In evaluation, once ``layer`` has computed the chunk: free what no other span will see."""
    store = state.store
    for rows in () if state.training else state.rows:
        if store.readers:
            for document, _ in rows.context:
                store.seen(layer, document, store.readers[document])
        elif rows.cut and rows.last:
            store.release(layer, rows.span.document)
