"""State of a chunk on its way through the layers of a stage."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_epp.ir import ALL_RANKS, Plan, Slices, Span
from megatron_epp.runtime.host_store import HostStore
from megatron_epp.runtime.kv_store import Store


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, stop) of a chunk's tensors, which hold the tokens of ``span``.

    Attributes:
        start: first row.
        stop: row after the last row.
        span: tokens [start, stop) of one document.
        cut: whether K/V of the document are cached, for later slices or continuing documents.
        last: whether no other span attends to this span's K/V.
        prefix: spans of other documents that this document continues, in order of position.
    """

    start: int
    stop: int
    span: Span
    cut: bool
    last: bool
    prefix: tuple[Span, ...] = ()

    @property
    def offset(self) -> int:
        """Position of the first token of the span's document: the number of prefix tokens."""
        return sum(span.tokens for span in self.prefix)

    @property
    def context(self) -> tuple[tuple[int, int], ...]:
        """Earlier tokens that the span attends to: (d, n) means the first n tokens of document d.

        The documents of the prefix come first. The last pair is the span's own document, unless
        the span begins its document.
        """
        others = [(span.document, span.stop) for span in self.prefix]
        own = [(self.span.document, self.span.start)] if self.span.start else []
        return (*others, *own)


@dataclass(slots=True)
class ChunkState:
    """State that accompanies a chunk through every layer of a stage, in forward and recompute.

    Attributes:
        chunk: number of the chunk.
        rows: rows of the spans that are sharded over context-parallel ranks.
        tokens: number of sharded rows, including padding after the spans.
        recompute: recompute modes (ir.recompute), one character per layer of this stage.
        store: K/V cache of sliced documents.
        training: whether a backward follows.
        host: store of offloaded activations; None without offload.
        router_stats: router statistics of the iteration (moe.router_stats.RouterStats); None
            without MoE or training.
        local: state of the documents that this rank computes alone, whose rows follow the sharded
            rows; None if no rank has such documents.
        local_documents: single-rank documents of the chunk, of all context-parallel ranks, in the
            chunk's order.
        lockstep_tokens: number of tokens of the largest of the chunks that run at the same time, on
            all replicas that share experts; None for ``tokens``.
        repeated: if one module runs as several layers, the index of the current layer minus the
            index of the first of these layers; else 0.
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
    lockstep_tokens: int | None = None
    repeated: int = 0
    _cached: dict[str, Any] = field(default_factory=dict, repr=False)

    def layer(self, installed: int) -> int:
        """Return the index of the current layer; ``installed`` is the first layer of its module."""
        return installed + self.repeated

    def again(self, layers: int) -> "ChunkState":
        """Return a copy of the state for a later layer of a repeated module.

        The later layer is ``layers`` layers after the module's first layer. Both states share the
        results of :meth:`once`.
        """
        return replace(self, repeated=layers)

    @property
    def largest_tokens(self) -> int:
        """Tokens of the largest chunk that runs with this chunk, on all ranks the same."""
        return self.tokens if self.lockstep_tokens is None else self.lockstep_tokens

    @property
    def used(self) -> int:
        """Number of rows before the padding; 0 for an empty chunk."""
        return self.rows[-1].stop if self.rows else 0

    def once[T](self, name: str, make: Callable[[], T]) -> T:
        """Return the result of ``make()``, computed once per ``name`` and chunk, then cached."""
        if name not in self._cached:
            self._cached[name] = make()
        return self._cached[name]


def chunk_rows(plan: Plan, slices: Slices, chunk: int, rank: int = ALL_RANKS) -> tuple[Rows, ...]:
    """Return the rows of the spans of a chunk that are sharded, or that ``rank`` computes alone.

    Row 0 is the first row of the first returned span. Sharding does not change row numbers.

    Args:
        plan: the plan.
        slices: slices of the plan.
        chunk: number of the chunk.
        rank: context-parallel rank that computes the spans alone; ALL_RANKS for the spans that are
            sharded over all context-parallel ranks.
    """
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
    """Return an empty K/V cache for an iteration of ``plan``.

    With ``stores_last_slice``, the buffers also have capacity for the documents' last slices.
    """
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
    """Free, in a forward-only pass, the K/V of ``layer`` that no later span attends to."""
    store = state.store
    for rows in () if state.training else state.rows:
        if store.readers:
            for document, _ in rows.context:
                store.seen(layer, document, store.readers[document])
        elif rows.cut and rows.last:
            store.release(layer, rows.span.document)
