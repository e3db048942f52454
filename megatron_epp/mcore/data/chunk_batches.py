"""Tensors of a plan's chunks: the tokens, positions, labels and loss mask that a stage needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy
import torch
from torch import Tensor

from megatron_epp.ir import Plan, Slices, Span
from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.layers.chunk_state import ChunkState, chunk_rows
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.data.global_batches import BatchDocument, TokenSource
from megatron_epp.mcore.data.mtp_targets import (
    Predictions,
    TargetRows,
    mtp_tokens,
    target_counts,
)
from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.runtime.kv_store import Store


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Inputs of a forward step: this rank's t rows of a chunk, as tensors [1, t].

    A tensor that the stage does not need is None. With D MTP modules, ``labels`` and ``loss_mask``
    are [1 + D, t], and loss_mask[1:] are weights of MTP losses (``mtp_targets.TargetRows``).

    Attributes:
        tokens: Int64, on the first stage.
        positions: Int64, on every stage.
        labels: Int64, on the last stage.
        loss_mask: Float32 (float64 with MTP), on the last stage: weights of the losses; 0 on
            padding.
        params: Parameters of the chunk for Megatron's layers.
        mtp_mask: Float64 [D, t], on the last stage: marks MTP labels with a loss
            (``mtp_targets.TargetRows``).
        known_gradient: Gradient with respect to every token's loss, with the shape of
            ``loss_mask``, if LM head and loss are fused (lm_head.fused_head).
        hidden_only: Whether the model ends after its final norm, because H and G ops of the plan
            compute LM head and loss. Every stage then has labels and loss mask.
    """

    tokens: Tensor | None
    positions: Tensor
    labels: Tensor | None
    loss_mask: Tensor | None
    params: ChunkParams
    known_gradient: Tensor | None = None
    hidden_only: bool = False
    mtp_mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Tensors of a ChunkBatch whose values come from the corpus.

    ``mtp_tokens`` [D, t] are the input tokens of the MTP modules, on the last stage.
    """

    tokens: Tensor | None
    positions: Tensor
    labels: Tensor | None
    loss_mask: Tensor | None
    mtp_mask: Tensor | None
    mtp_tokens: Tensor | None


class ChunkBatchBuilder:
    """Builder of the inputs of a plan's chunks, on one stage.

    Args:
        plan: The plan.
        slices: Slices of the plan's documents.
        samples: For every document of the plan, the samples that contain it. Its tokens are read
            from one of these. Without shared prefixes, there is one sample, which is the document.
        ends: For each sample of the replica, the number of the plan's document that contains its
            end.
        documents: Source of the tokens.
        stage: Index of the stage.
        row_shard: Sharding of a chunk's rows over ranks.
        device: Device of the tensors.
        predictions: Number of MTP modules, and their loss weight. None: only the next token.
        lockstep: Plans of all replicas that run in lockstep; empty: only ``plan``.
    """

    def __init__(
        self,
        plan: Plan,
        slices: Slices,
        samples: Sequence[Sequence[BatchDocument]],
        ends: Sequence[int],
        documents: TokenSource,
        stage: int,
        row_shard: RowShard,
        device: torch.device,
        predictions: Predictions | None = None,
        lockstep: Sequence[Plan] = (),
    ):
        self._together = [each.chunks for each in lockstep or (plan,)]
        self.predictions = Predictions() if predictions is None else predictions
        self._target_counts: dict[int, numpy.ndarray] = {}  # by sample
        self.plan, self.slices, self.samples, self.ends = plan, slices, samples, ends
        self.documents, self.stage, self.row_shard = documents, stage, row_shard
        self.device = device
        self._ready: dict[int, _Tensors] = {}

    def rows(self, chunk: int) -> int:
        """Return the number of rows of ``chunk`` over all ranks, including padding."""
        return self.row_shard.rows(self.plan.chunks[chunk])

    def batch(self, chunk: int, store: Store, training: bool) -> ChunkBatch:
        """Return the batch of ``chunk``; read its tokens unless :meth:`prepare` has read them.

        Args:
            chunk: Index of the chunk in the plan.
            store: K/V store of the stage.
            training: Whether a backward of the chunk follows.
        """
        recompute = self.plan.recompute[self.stage][chunk]
        row_shard, of_chunk = self.row_shard, self.plan.chunks[chunk]
        sharded = row_shard.sharded_rows(of_chunk)
        state = ChunkState(
            chunk,
            chunk_rows(self.plan, self.slices, chunk),
            sharded * row_shard.parts,
            recompute,
            store,
            training,
            lockstep_tokens=max(chunks[chunk].tokens for chunks in self._together),
        )
        if of_chunk.has_local:
            rows = chunk_rows(self.plan, self.slices, chunk, row_shard.part)
            after = self.rows(chunk) // row_shard.parts - sharded
            state.local = ChunkState(chunk, rows, after, recompute, store, training)
            state.local_documents = tuple(s.document for s in of_chunk.spans if s.local)
        tensors = self._ready.pop(chunk, None) or self._tensors(chunk)
        return ChunkBatch(
            tokens=tensors.tokens,
            positions=tensors.positions,
            labels=tensors.labels,
            loss_mask=tensors.loss_mask,
            params=ChunkParams.of(state, tensors.positions[0], tensors.mtp_tokens),
            hidden_only=self.plan.vocabulary_parallel,
            mtp_mask=tensors.mtp_mask,
        )

    def prepare(self, chunk: int) -> None:
        """Read the tokens of ``chunk`` now for :meth:`batch`, while the GPU runs earlier ops."""
        self._ready[chunk] = self._tensors(chunk)

    def _tensors(self, chunk: int) -> _Tensors:
        """Read the tensors of this rank's rows from the corpus."""
        first, last = self.stage == 0, self.stage == self.plan.stages - 1
        # With vocabulary parallelism, every stage has labels among its vocabulary rows.
        predicts = last or self.plan.vocabulary_parallel
        count, depths = self.rows(chunk) // self.row_shard.parts, self.predictions.depths
        positions = numpy.zeros((1, count), dtype=numpy.int64)
        tokens = numpy.zeros((1, count), dtype=numpy.int64) if first else None
        mtp_rows = numpy.zeros((depths, count), dtype=numpy.int64) if last and depths else None
        targets = TargetRows(self.predictions, count) if predicts else None
        for local, span, start, stop in self._inputs(chunk):
            offset, samples = self.plan.offset(span.document), self.samples[span.document]
            there = start + offset, stop + offset  # in the samples
            positions[0, local] = numpy.arange(*there)
            if tokens is not None:
                tokens[0, local] = self.documents.inputs(samples[0].number, *there)
            if mtp_rows is not None:
                mtp_rows[:, local] = mtp_tokens(self.documents, samples[0], there, depths)
            if targets is None:
                continue
            for sample in samples:
                counts = partial(self._counts, sample)
                targets.add(local, self.documents, sample, there, counts)
        return _Tensors(
            tokens=None if tokens is None else self._tensor(tokens),
            positions=self._tensor(positions),
            labels=None if targets is None else self._tensor(targets.labels),
            loss_mask=None if targets is None else self._tensor(targets.weights),
            mtp_mask=None if targets is None or not depths else self._tensor(targets.mtp_mask),
            mtp_tokens=None if mtp_rows is None else self._tensor(mtp_rows),
        )

    def _counts(self, sample: BatchDocument) -> numpy.ndarray:
        """Return :func:`target_counts` of a document; the method caches it by number."""
        if sample.number not in self._target_counts:
            counts = target_counts(self.documents, sample, self.predictions)
            self._target_counts[sample.number] = counts
        return self._target_counts[sample.number]

    def _inputs(self, chunk: int) -> Iterator[tuple[slice, Span, int, int]]:
        """Yield (rows, span, start, stop) for each document in this rank's rows.

        ``rows`` of this rank hold the input tokens [start, stop) of the plan's document of
        ``span``, counted without those of its prefix.
        """
        sharded = self.row_shard.sharded_rows(self.plan.chunks[chunk])
        own = slice(self.row_shard.part * sharded, (self.row_shard.part + 1) * sharded)
        for rows in chunk_rows(self.plan, self.slices, chunk):
            begin, end = max(rows.start, own.start), min(rows.stop, own.stop)
            if begin < end:
                start = rows.span.start + begin - rows.start
                local = slice(begin - own.start, end - own.start)
                yield local, rows.span, start, start + end - begin
        for rows in chunk_rows(self.plan, self.slices, chunk, self.row_shard.part):
            yield slice(sharded + rows.start, sharded + rows.stop), rows.span, 0, rows.span.stop

    def _tensor(self, array: numpy.ndarray) -> Tensor:
        """Copy an array to the device, from pinned memory, so that the copy is asynchronous."""
        return on_device(torch.from_numpy(array), self.device)
