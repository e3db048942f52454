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

In a layer with a window the store has tails (tails.py): a slice's call has the one in front of it
and the slice's own rows, copied side by side. Both ends of a window are aligned like the mask.

T rows of the chunk, S keys of a call, H query heads, G key heads, D head size, P context.
"""

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_epp.layers.attention.tails import SliceTails, keys_and_values
from megatron_epp.layers.chunk_state import ChunkState, Rows, let_go
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
    _padded: dict[int, "CuSeqlens"] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> "CuSeqlens":
        return cls(_sums(queries, device), _sums(keys, device), max(queries), max(keys))

    def padded(self, documents: int) -> "CuSeqlens":
        """Return the same, followed by empty documents up to ``documents`` in all; made once."""
        more = documents + 1 - len(self.queries)
        if more <= 0:
            return self
        if documents not in self._padded:
            queries, keys = (torch.cat((x, x[-1:].expand(more))) for x in (self.queries, self.keys))
            self._padded[documents] = replace(self, queries=queries, keys=keys, _padded={})
        return self._padded[documents]

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
    """Operands of one call: queries [T, H, D], keys and values [S, G, D], all contiguous; logits of
    the heads' sinks [H], in a layer that has them."""

    q_THD: Tensor
    k_SGD: Tensor
    v_SGD: Tensor
    cu_seqlens: CuSeqlens
    sinks_H: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that have gradients: q, k, v and the sinks."""
        qkv = self.q_THD, self.k_SGD, self.v_SGD
        return qkv if self.sinks_H is None else (*qkv, self.sinks_H)


class Kernel(Protocol):
    """Attention of one call; the mask is causal at the bottom right.

    ``forward`` gives the output [T, H, D] and, for a backward to come, what the kernel needs of it
    beyond the operands, which ``backward`` is given again; it gives the gradients of q, k, v and,
    where there are any, of the sinks.
    """

    name: str

    def of_layers(self, before: int | None, sinks: bool) -> "Kernel":
        """The same of layers in which queries see ``before`` inputs in front of them (None: all),
        with or without sinks. ValueError, ImportError: there is none."""
        ...

    def forward(self, call: Operands, backward: bool) -> tuple[Tensor, Any]: ...

    def backward(self, grad_THD: Tensor, call: Operands, kept: Any) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of a chunk, for one call; ``slice``: the slice of a cut document that they
    are, or the branch of another; None: whole documents.
    """

    start: int
    stop: int
    slice: Rows | None
    cu_seqlens: CuSeqlens

    @property
    def local(self) -> builtins.slice:
        return builtins.slice(self.start, self.stop)


def pieces_of(
    state: ChunkState, device: torch.device, before: int | None = None
) -> tuple[Piece, ...]:
    """The calls that ``state``'s chunk takes in layers whose queries see ``before`` inputs in front
    of them (None: all); made for the first such layer, used by all."""
    return state.once(f"pieces {before}", lambda: tuple(_pieces(state.rows, device, before)))


def _pieces(rows: Sequence[Rows], device: torch.device, before: int | None):
    uncut: list[Rows] = []

    def side_by_side():
        if uncut:
            lengths = [r.span.tokens for r in uncut]
            cu_seqlens = CuSeqlens.of(lengths, lengths, device)
            yield Piece(uncut[0].start, uncut[-1].stop, None, cu_seqlens)
            uncut.clear()

    for r in rows:
        if r.cut or r.prefix:
            yield from side_by_side()
            position = r.offset + r.span.start
            seen = position if before is None else min(before, position)
            cu_seqlens = CuSeqlens.of([r.span.tokens], [seen + r.span.tokens], device)
            yield Piece(r.start, r.stop, r, cu_seqlens)
        else:
            uncut.append(r)
    yield from side_by_side()


class VarlenAttention:
    """Attention of chunks by ``kernel``; ``all_heads``: the kernel for all heads, if it is another.

    ``before`` and ``sinks``: of the kernel's layers (``of_layer``).
    """

    stores_last_slice = True  # of layers without a window
    stores_latent = False

    def __init__(
        self,
        kernel: Kernel,
        uncut: Kernel | None = None,
        before: int | None = None,
        sinks: Callable[[], Tensor | None] = lambda: None,
    ):
        self.kernel, self._all_heads = kernel, uncut
        self.before, self.sinks = before, sinks
        self.name = kernel.name
        self.stores_last_slice = before is None

    @property
    def all_heads(self) -> "VarlenAttention":
        if self._all_heads is None:
            return self
        return VarlenAttention(self._all_heads, None, self.before, self.sinks)

    def of_layer(self, before: int | None, sinks: Callable[[], Tensor | None]) -> "VarlenAttention":
        """The same of a layer in which queries see ``before`` inputs in front of them (None: all),
        with ``sinks``: the logits of its heads' sinks, [H], or None."""
        with_sinks = sinks() is not None
        if before is None and not with_sinks:
            return self
        kernel = self.kernel.of_layers(before, with_sinks)
        uncut = None if self._all_heads is None else self._all_heads.of_layers(before, with_sinks)
        return VarlenAttention(kernel, uncut, before, sinks)

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
        seeing = _Seeing(self.kernel, self.before)
        return _Attend.apply(
            q_THD, k_TGD, v_TGD, self.sinks(), state, layer, seeing, backward, recompute
        ), recompute


@dataclass(frozen=True, slots=True)
class _Seeing:
    """View of a layer's queries: ``before`` inputs in front of each, or all, by its kernel."""

    kernel: Kernel
    before: int | None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        sinks_H: Tensor | None,
        state: ChunkState,
        layer: int,
        seeing: _Seeing,
        backward: bool,
        recompute: AttentionRecompute | None,
    ) -> Tensor:
        # A view of the fused QKV projection's output would keep all of that alive.
        q_THD, k_TGD, v_TGD = q_THD.contiguous(), k_TGD.contiguous(), v_TGD.contiguous()
        store = state.store
        pieces = pieces_of(state, q_THD.device, seeing.before)
        sinks_H = None if sinks_H is None else sinks_H.detach()
        call = _Call(seeing, state, layer, pieces, sinks_H)
        for piece in pieces:
            if piece.slice is None or not piece.slice.cut:
                continue
            if seeing.before is None:
                span, local = piece.slice.span, piece.local
                store.append(layer, span.document, span.start, k_TGD[local], v_TGD[local])
            else:
                call.tails(piece.slice).keep(k_TGD, v_TGD)
        out_THD, kept = call.forward(q_THD, k_TGD, v_TGD, backward and recompute is None)
        let_go(state, layer)
        hooks = SavedTensorHooks()
        ctx.call, ctx.hooks, ctx.recompute = call, hooks, recompute
        ctx.kept = [_each_tensor(hooks.pack, needed) for needed in kept]
        if recompute is not None:
            recompute.of(ctx, _recomputed)
        slices = bool(pieces) and all(p.slice is not None and p.slice.cut for p in pieces)
        stored = slices and seeing.before is None
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

    seeing: _Seeing
    state: ChunkState
    layer: int
    pieces: tuple[Piece, ...]
    sinks_H: Tensor | None

    def tails(self, rows: Rows) -> SliceTails:
        assert self.seeing.before is not None, "a layer without a window keeps all rows"
        return SliceTails(self.state.store, self.layer, rows, self.seeing.before)

    def inputs(self, ctx: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        q_THD, *others = ctx.saved_tensors
        return (q_THD, *others) if others else (q_THD, None, None)

    def forward(
        self, q_THD: Tensor, k_TGD: Tensor | None, v_TGD: Tensor | None, backward: bool
    ) -> tuple[Tensor, list[Any]]:
        outputs, kept, kernel = [], [], self.seeing.kernel
        for piece in self.pieces:
            out, needed = kernel.forward(self._operands(piece, q_THD, k_TGD, v_TGD), backward)
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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k, v and of the sinks."""
        pieces: list[tuple[Tensor, ...]] = []
        sinks_H, dsinks_H = self.sinks_H, None
        if sinks_H is not None:  # of all pieces, rounded once
            wide = torch.promote_types(sinks_H.dtype, torch.float32)
            dsinks_H = torch.zeros_like(sinks_H, dtype=wide)
        # What continues others of the chunk stands behind them.
        for index, piece in reversed(tuple(enumerate(self.pieces))):
            call = self._operands(piece, q_THD, k_TGD, v_TGD)
            dq, dk, dv, *others = self.seeing.kernel.backward(
                grad_THD[piece.local], call, kept[index]
            )
            kept[index] = None  # freed before the next piece makes its gradients
            if dsinks_H is not None:
                dsinks_H += others[0]
            if piece.slice is not None:
                dk, dv = self._of_slice(piece.slice, dk, dv)
            pieces.append((dq, dk, dv))
        if k_TGD is not None and v_TGD is not None and not pieces:  # an empty chunk
            nothing = torch.zeros_like
            empty = nothing(q_THD), nothing(k_TGD), nothing(v_TGD)
            return *empty, None if sinks_H is None else nothing(sinks_H)
        dq_THD, dk_TGD, dv_TGD = (
            self._joined(parts, q_THD) for parts in zip(*reversed(pieces), strict=True)
        )  # fmt: skip
        of_sinks = None if sinks_H is None or dsinks_H is None else dsinks_H.to(sinks_H.dtype)
        return dq_THD, dk_TGD, dv_TGD, of_sinks

    def _operands(
        self, piece: Piece, q_THD: Tensor, k_TGD: Tensor | None, v_TGD: Tensor | None
    ) -> Operands:
        """Operands of the piece's call; a slice's begin with the keys and values of its context.
        Those of a branch are put together, as the kernels want them in one tensor: a copy."""
        if piece.slice is not None and self.seeing.before is None:
            spans, store = list(piece.slice.prefix), self.state.store
            if piece.slice.cut:  # its own rows are there, too
                spans.append(piece.slice.span)
            keys = [store.context(self.layer, span.document, span.stop) for span in spans]
        elif piece.slice is not None and (front := self.tails(piece.slice).context()) is not None:
            keys = [front]
        else:
            keys = []
        if piece.slice is None or not piece.slice.cut or self.seeing.before is not None:
            assert k_TGD is not None and v_TGD is not None, "they lie in no store"
            keys.append((k_TGD[piece.local], v_TGD[piece.local]))
        return Operands(q_THD[piece.local], *keys_and_values(keys), piece.cu_seqlens, self.sinks_H)

    def _of_slice(self, rows: Rows, dk_SGD: Tensor, dv_SGD: Tensor) -> tuple[Tensor, Tensor]:
        """Leave the context's gradients in the store; the slice's own, with what later slices
        left there for it."""
        store, span = self.state.store, rows.span
        if self.seeing.before is not None:
            own = dk_SGD[-span.tokens :], dv_SGD[-span.tokens :]
            front = dk_SGD[: -span.tokens], dv_SGD[: -span.tokens]
            self.tails(rows).hand_over(own, front if rows.context else None)
            return own
        own = dk_SGD[-span.tokens :], dv_SGD[-span.tokens :]
        if rows.cut and not rows.last:
            # In float32, where later slices' gradients have added up: rounded once.
            later = store.gradient(self.layer, span.document, span.start, span.stop)
            dk, dv = ((a + b).to(a.dtype) for a, b in zip(own, later, strict=True))
            own = dk, dv
        begin = 0
        for document, inputs in rows.context:
            part = slice(begin, begin + inputs)
            store.add_gradient(self.layer, document, dk_SGD[part], dv_SGD[part])
            begin += inputs
        if rows.cut and span.start == 0:
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
            joined[piece.local] = part
        joined[used:] = 0
        return joined


def _recomputed(ctx: Any) -> tuple[Tensor, list[Any]]:
    """(output, what its backward needs) of a forward whose own was dropped."""
    call: _Call = ctx.call
    return call.forward(*call.inputs(ctx), True)
