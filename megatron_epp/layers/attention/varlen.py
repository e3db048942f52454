"""Attention of a chunk by kernels that support different numbers of queries and keys.

    rows of the chunk             piece          keys of the kernel's call
    doc 1  unsliced |  packed: one call      |  the documents' rows
    doc 2  unsliced |                        |
    doc 0  slice    |  a call of its own     |  context and the slice's rows, contiguous

The mask is causal and aligned at the bottom right: the last query sees all keys. For unsliced
documents this is the ordinary mask.

        keys  0 1 2 3 4           a slice of 2 queries after a context of 3 tokens
    query 3   # # # # .
    query 4   # # # # #

A slice's K/V are written after its context in the store, where the kernel reads both without
concatenation; only the keys of a document that continues another are concatenated. The last slice's
K/V, which no later slice attends to, are stored too: the buffers have capacity for full documents
(``stores_last_slice``). A sliding-window layer stores tails (tails.py): a slice's call gets a copy
of the tail before the slice and of the slice's rows. Windows are aligned at the bottom right, like
the mask.

Shape suffixes: T rows of the chunk, S keys of a call, H query heads, G key heads, D head size.
"""

import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_epp.layers.attention.tails import SliceTails, keys_and_values
from megatron_epp.layers.chunk_state import ChunkState, Rows, let_go
from megatron_epp.layers.recompute.outputs import AttentionRecompute
from megatron_epp.layers.saved_tensors import SavedTensorHooks


@dataclass(frozen=True, slots=True)
class CuSeqlens:
    """Cumulative lengths of the documents of one call.

    Attributes:
        queries: [documents + 1] int32 cumulative numbers of queries, on the device.
        keys: [documents + 1] int32 cumulative numbers of keys, on the device.
        most_queries: largest number of queries of a document.
        most_keys: largest number of keys of a document.
        powers: exponents of the powers of two to which the number of documents, ``most_queries``
            and ``most_keys`` round up, and whether ``most_queries`` equals ``most_keys``.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    powers: tuple[int, int, int, bool] = field(init=False, compare=False)
    _padded: dict[int, "CuSeqlens"] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self):
        documents = (self.queries.shape[0] - 2).bit_length()
        queries, keys = (self.most_queries - 1).bit_length(), (self.most_keys - 1).bit_length()
        equal = self.most_queries == self.most_keys
        object.__setattr__(self, "powers", (documents, queries, keys, equal))

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> "CuSeqlens":
        """Compute cumulative lengths from the numbers of queries and keys of every document."""
        return cls.of_calls([(queries, keys)], device)[0]

    @classmethod
    def of_calls(
        cls, calls: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device
    ) -> list["CuSeqlens"]:
        """Compute the lengths of several calls (queries, keys) with one copy to ``device``."""
        sums = [[0, *accumulate(lengths)] for call in calls for lengths in call]
        every = on_device(torch.tensor(list(chain(*sums)), dtype=torch.int32), device)
        parts = iter(every.split([len(lengths) for lengths in sums]))
        return [cls(next(parts), next(parts), max(queries), max(keys)) for queries, keys in calls]

    def padded(self, documents: int) -> "CuSeqlens":
        """Return a copy with empty documents appended up to ``documents`` in total; cached."""
        more = documents + 1 - len(self.queries)
        if more <= 0:
            return self
        if documents not in self._padded:
            queries, keys = (torch.cat((x, x[-1:].expand(more))) for x in (self.queries, self.keys))
            self._padded[documents] = replace(self, queries=queries, keys=keys, _padded={})
        return self._padded[documents]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Numbers of queries and keys of every document; synchronises with the device."""
        return list(zip(self.queries.diff().tolist(), self.keys.diff().tolist(), strict=True))


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to ``device``; the copy from pinned memory does not block the host."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True, slots=True)
class Operands:
    """Operands of one call, all contiguous.

    Attributes:
        q_THD: [queries, heads, head size] queries.
        k_SGD: [keys, groups, head size] keys.
        v_SGD: [keys, groups, value size] values.
        cu_seqlens: lengths of the documents.
        sinks_H: [heads] logits of the heads' sinks; None if the layer has none.
    """

    q_THD: Tensor
    k_SGD: Tensor
    v_SGD: Tensor
    cu_seqlens: CuSeqlens
    sinks_H: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Operands that have gradients: q, k, v and, if there are any, the sinks."""
        qkv = self.q_THD, self.k_SGD, self.v_SGD
        return qkv if self.sinks_H is None else (*qkv, self.sinks_H)

    @property
    def has_context(self) -> bool:
        """Whether a document has more keys than queries; none has fewer."""
        return self.k_SGD.shape[0] > self.q_THD.shape[0]


class Kernel(Protocol):
    """Interface of an attention kernel, with a causal mask aligned at the bottom right."""

    name: str

    def of_layers(self, before: int | None, sinks: bool) -> "Kernel":
        """Return the kernel of layers with a window or sinks.

        Args:
            before: number of earlier tokens that a query sees (window); None for all.
            sinks: whether the layers have sinks.

        Raises:
            ValueError: if no kernel supports the window or the sinks.
            TypeError: if the installed version of the kernel's package does not support sinks.
            ImportError: if a package of the kernel is missing.
        """
        ...

    def forward(self, call: Operands, backward: bool) -> tuple[Tensor, Any]:
        """Compute attention; return the output [T, H, D] and the state for :meth:`backward`.

        If ``backward`` is false, no backward follows, and the state may be None.
        """

    def backward(self, grad_THD: Tensor, call: Operands, kept: Any) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, and of the sinks if there are any, in their shapes.

        ``grad_THD`` [queries, heads, value size] is the gradient of the output, and ``kept`` the
        state that :meth:`forward` returned.
        """


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a chunk for one kernel call.

    Attributes:
        local: rows of the chunk.
        slice: rows of a slice, or of a document that continues another document; None if the rows
            are unsliced documents.
        cu_seqlens: lengths of the call's documents.
    """

    local: builtins.slice
    slice: Rows | None
    cu_seqlens: CuSeqlens


def pieces_of(
    state: ChunkState, device: torch.device, before: int | None = None
) -> tuple[Piece, ...]:
    """Return the kernel calls of a chunk in layers with a window of ``before`` tokens.

    ``before`` is None without a window. The result is computed in the first layer with this window,
    and cached for later layers with the same window.
    """
    return state.once(f"pieces {before}", lambda: _pieces(state.rows, device, before))


def _pieces(rows: Sequence[Rows], device: torch.device, before: int | None) -> tuple[Piece, ...]:
    calls: list[list[Rows]] = []
    for r in rows:
        if calls and not _alone(calls[-1][0]) and not _alone(r):
            calls[-1].append(r)
        else:
            calls.append([r])
    queries = [[r.span.tokens for r in call] for call in calls]
    keys = [[r.span.tokens + _seen(r, before) for r in call] for call in calls]
    lengths = CuSeqlens.of_calls(list(zip(queries, keys, strict=True)), device) if calls else []
    return tuple(
        Piece(slice(call[0].start, call[-1].stop), call[0] if _alone(call[0]) else None, cu_seqlens)
        for call, cu_seqlens in zip(calls, lengths, strict=True)
    )


def _alone(rows: Rows) -> bool:
    """Return whether ``rows`` are a call of their own: a slice, or the branch of a document."""
    return rows.cut or bool(rows.prefix)


def _seen(rows: Rows, before: int | None) -> int:
    """Return the number of tokens before ``rows`` that their queries see."""
    position = rows.offset + rows.span.start
    return position if before is None else min(before, position)


class VarlenAttention:
    """Attention of chunks by ``kernel``.

    Args:
        kernel: kernel for this rank's heads.
        uncut: kernel for all heads of the tensor-parallel rank, for documents that this rank
            computes alone; None to use ``kernel``.
        before: number of earlier tokens that a query sees (window); None for all.
        sinks: function that returns the logits [H] of the heads' sinks, or None without sinks.
    """

    stores_last_slice = True  # in layers without a window

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
        """Attention over all heads of the tensor-parallel rank; single-rank documents need it."""
        if self._all_heads is None:
            return self
        return VarlenAttention(self._all_heads, None, self.before, self.sinks)

    def of_layer(self, before: int | None, sinks: Callable[[], Tensor | None]) -> "VarlenAttention":
        """Return this attention for a layer with the window ``before`` and the ``sinks``."""
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
        """Return the output [T, H, D] and, if ``drop``, a handle that recomputes it in backward."""
        recompute = AttentionRecompute() if drop else None
        pieces, sinks_H = pieces_of(state, q_THD.device, self.before), self.sinks()
        detached = None if sinks_H is None else sinks_H.detach()
        keeps = torch.is_grad_enabled() and not drop
        call = _Call(self.kernel, self.before, state, layer, pieces, detached, keeps)
        sinks = () if sinks_H is None else (sinks_H,)
        return _Attend.apply(call, recompute, q_THD, k_TGD, v_TGD, *sinks), recompute


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: "_Call",
        recompute: AttentionRecompute | None,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        *sinks_H: Tensor,
    ) -> Tensor:
        # A view would keep the whole output of the fused QKV projection alive.
        q_THD, k_TGD, v_TGD = q_THD.contiguous(), k_TGD.contiguous(), v_TGD.contiguous()
        # Whether all rows lie in the store. Tails are copies of only some rows.
        stored = bool(call.pieces) and call.before is None
        for piece in call.pieces:
            if piece.slice is None or not piece.slice.cut:
                stored = False
            elif call.before is None:
                span, rows = piece.slice.span, (k_TGD[piece.local], v_TGD[piece.local])
                call.state.store.append(call.layer, span.document, span.start, *rows)
            else:
                call.tails(piece.slice).keep(k_TGD, v_TGD)
        out_THD, kept = call.forward(q_THD, k_TGD, v_TGD, call.keeps)
        if not call.state.training:
            let_go(call.state, call.layer)
        hooks = SavedTensorHooks()
        ctx.call, ctx.hooks, ctx.recompute = call, hooks, recompute
        ctx.kept = [_each_tensor(hooks.pack, x) for x in kept] if hooks.active else kept
        if recompute is not None:
            recompute.of(ctx, _recomputed)
        ctx.save_for_backward(q_THD, *(() if stored else (k_TGD, v_TGD)))
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor):
        call: _Call = ctx.call
        q_THD, k_TGD, v_TGD = call.inputs(ctx)
        if ctx.recompute is not None:
            _, kept = ctx.recompute.taken()
        elif ctx.hooks.active:
            kept = [_each_tensor(ctx.hooks.unpack, x) for x in ctx.kept]
        else:
            kept = ctx.kept
        ctx.kept = None
        *of_qkv, of_sinks = call.backward(grad_THD.contiguous(), q_THD, k_TGD, v_TGD, kept)
        return None, None, *of_qkv, *(() if of_sinks is None else (of_sinks,))


def _each_tensor(change: Callable[[Any], Any], needed: Any) -> Any:
    """Apply ``change`` to each tensor of a kernel's state ``needed``, if the state is a tuple."""
    return tuple(map(change, needed)) if isinstance(needed, tuple) else needed


@dataclass(frozen=True, slots=True)
class _Call:
    """Attention of one layer on one chunk; ``kept`` lists the kernel's state of each piece.

    Attributes:
        kernel: kernel of the layer.
        before: number of earlier tokens that a query sees; None for all.
        state: state of the chunk.
        layer: number of the layer in the stage.
        pieces: pieces of the chunk.
        sinks_H: [heads] logits of the heads' sinks, detached; None without sinks.
        keeps: whether the kernel's state is kept for the backward.
    """

    kernel: Kernel
    before: int | None
    state: ChunkState
    layer: int
    pieces: tuple[Piece, ...]
    sinks_H: Tensor | None
    keeps: bool

    def tails(self, rows: Rows) -> SliceTails:
        assert self.before is not None, "a layer without a window keeps all rows"
        return SliceTails(self.state.store, self.layer, rows, self.before)

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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of q, k, v and the sinks."""
        pieces: list[tuple[Tensor, ...]] = []
        sinks_H, dsinks_H = self.sinks_H, None
        if sinks_H is not None:  # summed over all pieces, rounded once
            wide = torch.promote_types(sinks_H.dtype, torch.float32)
            dsinks_H = torch.zeros_like(sinks_H, dtype=wide)
        # In reverse: branches come after the rows that they continue.
        for index, piece in reversed(tuple(enumerate(self.pieces))):
            call = self._operands(piece, q_THD, k_TGD, v_TGD)
            dq, dk, dv, *others = self.kernel.backward(grad_THD[piece.local], call, kept[index])
            kept[index] = None  # freed before the next piece allocates its gradients
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
        """Return the operands of the piece's call; a slice's keys begin with its context.

        The keys of a branch (a document that continues another document) are concatenated, because
        kernels need them in one tensor.
        """
        if piece.slice is not None and self.before is None:
            spans, store = piece.slice.prefix, self.state.store
            if piece.slice.cut:  # its own rows are stored too
                spans = (*spans, piece.slice.span)
            keys = [store.context(self.layer, span.document, span.stop) for span in spans]
        elif piece.slice is not None and (front := self.tails(piece.slice).context()) is not None:
            keys = [front]
        else:
            keys = []
        if piece.slice is None or not piece.slice.cut or self.before is not None:
            assert k_TGD is not None and v_TGD is not None, "they lie in no store"
            keys.append((k_TGD[piece.local], v_TGD[piece.local]))
        k_SGD, v_SGD = keys[0] if len(keys) == 1 else keys_and_values(keys)
        return Operands(q_THD[piece.local], k_SGD, v_SGD, piece.cu_seqlens, self.sinks_H)

    def _of_slice(self, rows: Rows, dk_SGD: Tensor, dv_SGD: Tensor) -> tuple[Tensor, Tensor]:
        """Add the context's gradients to the store; return the gradients of the slice's K and V.

        The result includes the gradients that later slices added to the store.
        """
        store, span = self.state.store, rows.span
        if self.before is not None:
            own = dk_SGD[-span.tokens :], dv_SGD[-span.tokens :]
            front = dk_SGD[: -span.tokens], dv_SGD[: -span.tokens]
            self.tails(rows).hand_over(own, front if rows.context else None)
            return own
        own = dk_SGD[-span.tokens :], dv_SGD[-span.tokens :]
        if rows.cut and not rows.last:
            # In float32, in which later slices' gradients accumulate: rounded once.
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
        """Return the rows of all pieces in order, with zeros in padding rows."""
        if not parts:
            return torch.zeros_like(q_THD)
        total, used = q_THD.shape[0], self.pieces[-1].local.stop
        if len(parts) == 1 and used == total:
            return parts[0].contiguous()
        joined = parts[0].new_empty(total, *parts[0].shape[1:])
        for piece, part in zip(self.pieces, parts, strict=True):
            joined[piece.local] = part
        joined[used:] = 0
        return joined


def _recomputed(ctx: Any) -> tuple[Tensor, list[Any]]:
    """Recompute a forward; return its output and the state for the backward."""
    call: _Call = ctx.call
    return call.forward(*call.inputs(ctx), True)
