"""Attention of a chunk by kernels that take queries and keys of different lengths.

    rows of the chunk             piece          keys of the kernel's call
    doc 1  whole   |  side by side: one call   |  their own rows
    doc 2  whole   |                           |
    doc 0  slice   |  a call of its own        |  context and own rows, one behind the other

The mask is causal, aligned at the bottom right: the last query sees all keys. For whole documents
that is the ordinary one.

        keys  0 1 2 3 4           a slice of 2 queries behind a context of 3 inputs
    query 3   # # # # .
    query 4   # # # # #

A slice's K and V are written behind its context in the store, so the kernel reads them there and
nothing is concatenated. That goes for the last slice, too, to whose K and V nobody attends later:
the store's buffers have room for whole documents (``stores_last_slice``).

T rows of the chunk, S keys of a call, H query heads, G key heads, D head size, P context.
"""

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_epp.layers.chunk_state import ChunkState, Rows
from megatron_epp.layers.recompute.outputs import AttentionRecompute
from megatron_epp.layers.saved_tensors import SavedTensorHooks


@dataclass(frozen=True, slots=True)
class CuSeqlens:
    """Cumulative lengths of the documents of one call: where each begins and ends.

    queries, keys         [documents + 1] int32 on the device, cumulative
    most_queries, most_keys   of one document
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> "CuSeqlens":
        return cls(_sums(queries, device), _sums(keys, device), max(queries), max(keys))

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(queries, keys) of every document; waits for the device."""
        return list(zip(self.queries.diff().tolist(), self.keys.diff().tolist(), strict=True))


def _sums(lengths: Sequence[int], device: torch.device) -> Tensor:
    return on_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on ``device``; from pinned memory, so that nobody waits for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True, slots=True)
class Operands:
    """Operands of one call: queries [T, H, D], keys and values [S, G, D], all contiguous."""

    q_THD: Tensor
    k_SGD: Tensor
    v_SGD: Tensor
    cu_seqlens: CuSeqlens

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_THD, self.k_SGD, self.v_SGD


class Kernel(Protocol):
    """Attention of one call; the mask is causal at the bottom right.

    ``forward`` gives the output [T, H, D] and, for a backward to come, what the kernel needs of it
    beyond the operands, which ``backward`` is given again; it gives the gradients of q, k and v.
    """

    name: str

    def forward(self, call: Operands, backward: bool) -> tuple[Tensor, Any]: ...

    def backward(
        self, grad_THD: Tensor, call: Operands, kept: Any
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of a chunk, for one call; ``slice``: the slice of a cut document that they
    are, or None: whole documents.
    """

    start: int
    stop: int
    slice: Rows | None
    cu_seqlens: CuSeqlens

    @property
    def mine(self) -> builtins.slice:
        return builtins.slice(self.start, self.stop)


def pieces_of(state: ChunkState, device: torch.device) -> tuple[Piece, ...]:
    """The calls that ``state``'s chunk takes; made for its first layer, used by all."""
    return state.once("pieces", lambda: tuple(_pieces(state.rows, device)))


def _pieces(rows: Sequence[Rows], device: torch.device):
    whole: list[Rows] = []

    def side_by_side():
        if whole:
            lengths = [r.span.tokens for r in whole]
            cu_seqlens = CuSeqlens.of(lengths, lengths, device)
            yield Piece(whole[0].start, whole[-1].stop, None, cu_seqlens)
            whole.clear()

    for r in rows:
        if r.cut:
            yield from side_by_side()
            cu_seqlens = CuSeqlens.of([r.span.tokens], [r.span.stop], device)
            yield Piece(r.start, r.stop, r, cu_seqlens)
        else:
            whole.append(r)
    yield from side_by_side()


class VarlenAttention:
    """Attention of chunks by ``kernel``; ``whole``: the kernel for all heads, if it is another."""

    stores_last_slice = True
    latents = False

    def __init__(self, kernel: Kernel, whole: Kernel | None = None):
        self.kernel, self._whole = kernel, whole
        self.name = kernel.name

    @property
    def whole(self) -> "VarlenAttention":
        return self if self._whole is None else VarlenAttention(self._whole)

    def of_layer(self, before: int | None, sinks: Callable[[], Tensor | None]) -> "VarlenAttention":
        raise ValueError("attention kernels of GPUs know neither windows nor sinks")

    def __call__(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        state: ChunkState,
        layer: int,
        drop: bool,
    ) -> tuple[Tensor, AttentionRecompute | None]:
        """The output [T, H, D]; where it is to be dropped, also the handle that recomputes it."""
        recompute = AttentionRecompute() if drop else None
        backward = torch.is_grad_enabled()
        kernel = self.kernel
        return _Attend.apply(
            q_THD, k_TGD, v_TGD, state, layer, kernel, backward, recompute
        ), recompute


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        state: ChunkState,
        layer: int,
        kernel: Kernel,
        backward: bool,
        recompute: AttentionRecompute | None,
    ) -> Tensor:
        # A view of the fused QKV projection's output would keep all of that alive.
        q_THD, k_TGD, v_TGD = q_THD.contiguous(), k_TGD.contiguous(), v_TGD.contiguous()
        store = state.store
        pieces = pieces_of(state, q_THD.device)
        for piece in pieces:
            if piece.slice is not None:
                span = piece.slice.span
                mine = piece.mine
                store.append(layer, span.document, span.start, k_TGD[mine], v_TGD[mine])
        call = _Call(kernel, state, layer, pieces)
        out_THD, kept = call.forward(q_THD, k_TGD, v_TGD, backward and recompute is None)
        if not state.training:
            for piece in pieces:
                if piece.slice is not None and piece.slice.last:
                    store.release(layer, piece.slice.span.document)
        hooks = SavedTensorHooks()
        ctx.call, ctx.hooks, ctx.recompute = call, hooks, recompute
        ctx.kept = [_each_tensor(hooks.pack, needed) for needed in kept]
        if recompute is not None:
            recompute.of(ctx, _recomputed)
        stored = bool(pieces) and all(piece.slice is not None for piece in pieces)
        ctx.save_for_backward(q_THD, *(() if stored else (k_TGD, v_TGD)))
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor):
        call: _Call = ctx.call
        q_THD, k_TGD, v_TGD = call.inputs(ctx)
        if ctx.recompute is None:
            kept = [_each_tensor(ctx.hooks.unpack, needed) for needed in ctx.kept]
        else:
            _, kept = ctx.recompute.taken()
        ctx.kept = None
        gradients = call.backward(grad_THD.contiguous(), q_THD, k_TGD, v_TGD, kept)
        return *gradients, None, None, None, None, None


def _each_tensor(change: Callable[[Any], Any], needed: Any) -> Any:
    """``change`` applied to the tensors that a kernel keeps, where they are plain tensors."""
    return tuple(map(change, needed)) if isinstance(needed, tuple) else needed


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's attention of one chunk; ``kept`` has an entry per piece."""

    kernel: Kernel
    state: ChunkState
    layer: int
    pieces: tuple[Piece, ...]

    def inputs(self, ctx: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        q_THD, *others = ctx.saved_tensors
        return (q_THD, *others) if others else (q_THD, None, None)

    def forward(
        self, q_THD: Tensor, k_TGD: Tensor | None, v_TGD: Tensor | None, backward: bool
    ) -> tuple[Tensor, list[Any]]:
        outputs, kept = [], []
        for piece in self.pieces:
            out, needed = self.kernel.forward(self._operands(piece, q_THD, k_TGD, v_TGD), backward)
            outputs.append(out)
            kept.append(needed)
        return self._joined(outputs, q_THD), kept

    def backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_TGD: Tensor | None,
        v_TGD: Tensor | None,
        kept: list[Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        made: list[tuple[Tensor, ...]] = []
        for index, piece in enumerate(self.pieces):
            call = self._operands(piece, q_THD, k_TGD, v_TGD)
            dq, dk, dv = self.kernel.backward(grad_THD[piece.mine], call, kept[index])
            kept[index] = None  # freed before the next piece makes its gradients
            if piece.slice is not None:
                dk, dv = self._of_slice(piece.slice, dk, dv)
            made.append((dq, dk, dv))
        if k_TGD is not None and v_TGD is not None and not made:  # an empty chunk
            return torch.zeros_like(q_THD), torch.zeros_like(k_TGD), torch.zeros_like(v_TGD)
        dq_THD, dk_TGD, dv_TGD = (
            self._joined(parts, q_THD) for parts in zip(*made, strict=True)
        )  # fmt: skip
        return dq_THD, dk_TGD, dv_TGD

    def _operands(
        self, piece: Piece, q_THD: Tensor, k_TGD: Tensor | None, v_TGD: Tensor | None
    ) -> Operands:
        """Operands of the piece's call; a slice's begin with the keys and values of its context."""
        if piece.slice is None:
            assert k_TGD is not None and v_TGD is not None, "whole documents lie in no store"
            keys = k_TGD[piece.mine], v_TGD[piece.mine]
        else:
            span = piece.slice.span
            keys = self.state.store.context(self.layer, span.document, span.stop)
        return Operands(q_THD[piece.mine], *keys, piece.cu_seqlens)

    def _of_slice(self, rows: Rows, dk_SGD: Tensor, dv_SGD: Tensor) -> tuple[Tensor, Tensor]:
        """Leave the context's gradients in the store; the slice's own, with what later slices
        left there for it."""
        store, span = self.state.store, rows.span
        behind = span.start
        own = dk_SGD[behind:], dv_SGD[behind:]
        if not rows.last:
            # In float32, where later slices' gradients have added up: rounded once.
            later = store.gradient(self.layer, span.document, span.start, span.stop)
            dk, dv = ((a + b).to(a.dtype) for a, b in zip(own, later, strict=True))
            own = dk, dv
        if behind:
            store.add_gradient(self.layer, span.document, dk_SGD[:behind], dv_SGD[:behind])
        else:
            store.release(self.layer, span.document)
        return own

    def _joined(self, parts: Sequence[Tensor], q_THD: Tensor) -> Tensor:
        """The pieces' rows one behind the other, and zeros for the padding."""
        if not parts:
            return torch.zeros_like(q_THD)
        total, used = q_THD.shape[0], self.pieces[-1].stop
        if len(parts) == 1 and used == total:
            return parts[0].contiguous()
        joined = parts[0].new_empty(total, *parts[0].shape[1:])
        for piece, part in zip(self.pieces, parts, strict=True):
            joined[piece.mine] = part
        joined[used:] = 0
        return joined


def _recomputed(ctx: Any) -> tuple[Tensor, list[Any]]:
    """(output, what its backward needs) of a forward whose own was dropped."""
    call: _Call = ctx.call
    return call.forward(*call.inputs(ctx), True)
