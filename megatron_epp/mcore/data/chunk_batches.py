"""The tensors of a plan's chunks: tokens, positions, labels and loss mask, where needed."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from megatron_epp.ir import Plan, Slices, Span
from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.layers.chunk_state import ChunkState, chunk_rows
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.data.global_batches import TokenSource
from megatron_epp.mcore.data.row_share import RowShare
from megatron_epp.runtime.kv_store import Store


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Inputs of a forward step, this rank's t rows of a chunk: [1, t], None where not needed.

    tokens      int64, first stage      labels      int64, last stage
    positions   int64, every stage      loss_mask   float32, last stage; 0 on padding
    known_gradient   of every token's loss, where backward of the head runs early (model.early_head)
    hidden_only      whether the model ends behind its last norm, as the plan's H and G do the rest;
                     labels and loss mask are then every stage's
    """

    tokens: Tensor | None
    positions: Tensor
    labels: Tensor | None
    loss_mask: Tensor | None
    params: ChunkParams
    known_gradient: Tensor | None = None
    hidden_only: bool = False


# Tokens, positions, labels, loss mask.
_Tensors = tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]


class ChunkBatchBuilder:
    """Makes the batches of a plan's chunks. ``samples[d]`` is document d's place in the corpus."""

    def __init__(
        self,
        plan: Plan,
        slices: Slices,
        samples: numpy.ndarray,
        documents: TokenSource,
        stage: int,
        share: RowShare,
        device: torch.device,
    ):
        self.plan, self.slices, self.samples = plan, slices, samples
        self.documents, self.stage, self.share = documents, stage, share
        self.device = device
        self._ready: dict[int, _Tensors] = {}

    def rows(self, chunk: int) -> int:
        """Rows of the chunk's tensors over all ranks: its tokens, padded."""
        return self.share.rows(self.plan.chunks[chunk])

    def batch(self, chunk: int, store: Store, training: bool) -> ChunkBatch:
        recompute = self.plan.recompute[self.stage][chunk]
        share, of_chunk = self.share, self.plan.chunks[chunk]
        spread = share.spread_rows(of_chunk)
        state = ChunkState(
            chunk,
            chunk_rows(self.plan, self.slices, chunk),
            spread * share.parts,
            recompute,
            store,
            training,
        )
        if of_chunk.has_local:
            rows = chunk_rows(self.plan, self.slices, chunk, share.part)
            behind = self.rows(chunk) // share.parts - spread
            state.local = ChunkState(chunk, rows, behind, recompute, store, training)
            state.local_documents = tuple(s.document for s in of_chunk.spans if s.local)
        tensors = self._ready.pop(chunk, None) or self._tensors(chunk)
        tokens, positions, labels, loss_mask = tensors
        return ChunkBatch(
            tokens=tokens,
            positions=positions,
            labels=labels,
            loss_mask=loss_mask,
            params=ChunkParams.of(state, positions[0]),
            hidden_only=self.plan.vocabulary_parallel,
        )

    def prepare(self, chunk: int) -> None:
        """Read the tokens of ``chunk`` now: while a GPU computes what was asked before."""
        self._ready[chunk] = self._tensors(chunk)

    def _tensors(self, chunk: int) -> _Tensors:
        """Tokens, positions, labels and loss mask of this rank's rows."""
        first, last = self.stage == 0, self.stage == self.plan.stages - 1
        last = last or self.plan.vocabulary_parallel  # every stage has words to find labels among
        count = self.rows(chunk) // self.share.parts
        positions = numpy.zeros(count, dtype=numpy.int64)
        tokens = numpy.zeros(count, dtype=numpy.int64) if first else None
        labels = numpy.zeros(count, dtype=numpy.int64) if last else None
        loss_mask = numpy.zeros(count, dtype=numpy.float32) if last else None
        for mine, span, start, stop in self._inputs(chunk):
            sample = int(self.samples[span.document])
            positions[mine] = numpy.arange(start, stop)
            if tokens is not None:
                tokens[mine] = self.documents.inputs(sample, start, stop)
            if labels is not None and loss_mask is not None:
                labels[mine], loss_mask[mine] = self.documents.targets(sample, start, stop)
        return (
            None if tokens is None else self._tensor(tokens),
            self._tensor(positions),
            None if labels is None else self._tensor(labels),
            None if loss_mask is None else self._tensor(loss_mask),
        )

    def _inputs(self, chunk: int) -> Iterator[tuple[slice, Span, int, int]]:
        """(rows of this rank, span, start, stop): which inputs of which document they hold."""
        spread = self.share.spread_rows(self.plan.chunks[chunk])
        share = slice(self.share.part * spread, (self.share.part + 1) * spread)
        for rows in chunk_rows(self.plan, self.slices, chunk):
            begin, end = max(rows.start, share.start), min(rows.stop, share.stop)
            if begin < end:
                start = rows.span.start + begin - rows.start
                mine = slice(begin - share.start, end - share.start)
                yield mine, rows.span, start, start + end - begin
        for rows in chunk_rows(self.plan, self.slices, chunk, self.share.part):
            yield slice(spread + rows.start, spread + rows.stop), rows.span, 0, rows.span.stop

    def _tensor(self, array: numpy.ndarray) -> Tensor:
        """[T] on the host -> [1, T] on the device; pinned first, so that no copy is waited for."""
        return on_device(torch.from_numpy(array)[None], self.device)
