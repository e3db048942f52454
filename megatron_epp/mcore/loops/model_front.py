"""Language part of a loop's model, which computes slices, and the modules before it.

    encoder, word embedding, ...    run once on the full document, before its first slice
    language part                   contains Megatron's layers, and computes slice by slice

The backward of the encoder also runs once. It follows the last backward of the document's slices,
which is that of the first slice. In shapes, L is the number of tokens of a document, t the number
of rows of a chunk on this rank, T the number of its rows on all ranks, and H the hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_epp.layers.chunk_state import Rows
from megatron_epp.mcore.data.row_shard import RowShard

# Arguments of a language part's forward that slices set themselves or ignore.
_KNOWN = frozenset(
    [
        "input_ids",
        "position_ids",
        "attention_mask",
        "decoder_input",
        "labels",
        "loss_mask",
        "packed_seq_params",
        "inference_context",
        "inference_params",
        "runtime_gather_output",
    ]
)


def language_part(model: Any) -> Any:
    """Return the module with Megatron's decoder layers in a loop's unwrapped ``model``.

    This module is often the model itself.

    Raises:
        ValueError: No module has decoder layers, or several modules have decoder layers.
    """
    modules = [
        module
        for module in model.modules()
        if isinstance(module, LanguageModule)
        and getattr(getattr(module, "decoder", None), "layers", None) is not None
    ]
    if len(modules) == 1:
        return modules[0]
    holds = "several modules with" if modules else "no module of Megatron's with"
    raise ValueError(
        f"a {type(model).__name__} holds {holds} a decoder of Megatron's layers (TransformerBlock "
        "or HybridStack); expected one, as GPTModel and HybridModel are, or contain"
    )


class ReachedError(Exception):
    """Exception that ends the forward of a model where its language part begins.

    ``given`` contains the arguments of the language part's forward.
    """

    def __init__(self, arguments: Mapping[str, Any]):
        super().__init__("the language part of the model was reached")
        self.given = arguments


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """Inputs of a chunk from the modules before the language part.

    Attributes:
        hidden: Hidden states [t, 1, H], a leaf of autograd; None on stages after the first.
        positions: Positions [axes, 1, t]; None if positions have one axis.
    """

    hidden: Tensor | None
    positions: Tensor | None


@dataclass(slots=True, eq=False)
class _Document:
    """Hidden states [L, 1, H] with their autograd graph, and positions [axes, 1, L]."""

    hidden: Tensor | None
    positions: Tensor | None
    gradient: Tensor | None = None


@dataclass(eq=False)
class EncodedDocuments:
    """Documents of a call as encoded by the modules before the layers.

    Attributes:
        encode: Function (document) -> arguments of the language part's forward for the full
            document.
        lengths: Number of tokens of every document.
        row_shard: This rank's shard of a chunk's rows.
        tp_group: Tensor-parallel group.
        training: Whether gradients are needed.
    """

    encode: Callable[[int], Mapping[str, Any]]
    lengths: Sequence[int]
    row_shard: RowShard
    tp_group: Any
    training: bool
    _documents: dict[int, _Document] = field(default_factory=dict)
    _shapes: _Document | None = None  # of no token
    _chunks: dict[int, tuple[Tensor, tuple[Rows, ...], int]] = field(default_factory=dict)

    def inputs(self, chunk: int, rows: Sequence[Rows], total: int) -> ChunkInputs:
        """Encode the documents that begin in a chunk, and return this rank's inputs of the chunk.

        Call this method once per chunk, in the chunk's forward.

        Args:
            chunk: Number of the chunk.
            rows: Slices of the chunk, in order.
            total: Number of rows of the chunk over all ranks, including padding.

        Raises:
            ValueError: The modules before the layers pass arguments that slices do not support, or
                fewer rows than the document has tokens.
        """
        for part in rows:
            if part.span.start == 0:
                self._documents[part.span.document] = self._encoded(part.span.document)
        documents = [self._documents[part.span.document] for part in rows]
        if not rows:  # an empty chunk: the shapes are those of any document
            with torch.no_grad():
                documents = [self._shapes or self._encoded(0)]
        local = self._local(total)
        hidden = positions = None
        if (like := documents[0].hidden) is not None:
            hidden = like.new_zeros(total, *like.shape[1:])
            for part, document in zip(rows, documents, strict=False):
                assert document.hidden is not None
                document_hidden = document.hidden.detach()[part.span.start : part.span.stop]
                hidden[part.start : part.stop] = document_hidden
            hidden = hidden[local]
            if self.training:
                hidden.requires_grad_()
                self._chunks[chunk] = hidden, tuple(rows), total
        if (of := documents[0].positions) is not None:
            positions = of.new_zeros(*of.shape[:-1], total)
            for part, document in zip(rows, documents, strict=False):
                assert document.positions is not None
                span = slice(part.span.start, part.span.stop)
                positions[..., part.start : part.stop] = document.positions[..., span]
            positions = positions[..., self.row_shard.local(total)]
        if not self.training:
            for part in rows:
                if part.last:
                    del self._documents[part.span.document]
        return ChunkInputs(hidden, positions)

    def backward(self, chunk: int) -> None:
        """Accumulate the gradients of the chunk's inputs, after the chunk's backward.

        If the chunk contains the first slice of a document, the gradient of this document is now
        complete. The backward of the modules before the layers then runs for this document.
        """
        if chunk not in self._chunks:
            return
        hidden, rows, total = self._chunks.pop(chunk)
        gradient = hidden.new_zeros(total, *hidden.shape[1:])
        if hidden.grad is not None:
            gradient[self._local(total)] = hidden.grad
        for part in rows:
            document = self._documents[part.span.document]
            assert document.hidden is not None
            if document.gradient is None:
                document.gradient = torch.zeros_like(document.hidden)
            span = slice(part.span.start, part.span.stop)
            document.gradient[span] += gradient[part.start : part.stop]
            if part.span.start == 0:
                del self._documents[part.span.document]
                if document.hidden.requires_grad:
                    torch.autograd.backward(document.hidden, document.gradient)

    def clear(self) -> None:
        """Free all saved documents and chunks."""
        self._documents.clear()
        self._chunks.clear()

    def _encoded(self, number: int) -> _Document:
        arguments, length = self.encode(number), self.lengths[number]
        strange = [n for n, value in arguments.items() if value is not None and n not in _KNOWN]
        if strange:
            raise ValueError(
                f"what precedes the model's layers hands them {', '.join(strange)}; "
                "expected only what slices take: use Megatron's own schedule (no attach)"
            )
        hidden, positions = arguments.get("decoder_input"), arguments.get("position_ids")
        if hidden is not None and self.row_shard.splits > 1:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self.tp_group
            )
        if positions is not None and positions.dim() < 3:
            positions = None  # the position in the document, which the slice knows
        for count in (x.shape[at] for x, at in ((hidden, 0), (positions, -1)) if x is not None):
            if count < length:
                raise ValueError(
                    f"what precedes the model's layers gives {count} rows of a document "
                    f"of {length} tokens; expected all of them (adapter.lengths count what the "
                    "layers see, and no rank takes a part before them)"
                )
        none = hidden if hidden is None else hidden.new_empty(0, *hidden.shape[1:])
        self._shapes = _Document(none, positions if positions is None else positions[..., :0])
        return _Document(hidden, positions)

    def _local(self, total: int) -> slice:
        """Return the range of this rank's rows of a chunk, after sequence-parallel sharding."""
        if self.row_shard.splits == 1:
            return self.row_shard.local(total)
        count = total // self.row_shard.parts // self.row_shard.splits
        first = self.row_shard.local(total).start + self.tp_group.rank() * count
        return slice(first, first + count)
