"""Attention of a chunk on CPUs: a document attends to itself, a slice also to its cached context.

    rows of the chunk        keys
                     context (store)      rows of the chunk
    slice of doc 0  [################]  [#          ]
                    [################]  [##         ]
    doc 1                               [    #      ]
                                        [    ##     ]
    doc 2                               [       #   ]

Nothing else is computed: documents do not attend to each other, and no masked part of the context
is read. If a document continues other documents, their prefixes are its context. A prefix may be in
earlier rows of the same chunk.

For a slice, attention to the context (no mask) and to the slice's rows (causal mask) is computed
separately and merged by the log-sum-exps. The backwards of both parts use the merged log-sum-exp.
Documents of a chunk that continue the same prefix attend to it in one call: the kernel is faster
with more queries (cpu_flash.py), and the gradients of the prefix are added up once. A
sliding-window layer sees and caches only the tail of the context (window.py, tails.py). The sinks'
part of the softmax is merged last (merge.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.attention.cpu_flash import attend, attend_backward
from megatron_epp.layers.attention.merge import merged, sinks_gradient, with_sinks
from megatron_epp.layers.attention.tails import SliceTails
from megatron_epp.layers.chunk_state import ChunkState, Rows, let_go
from megatron_epp.layers.recompute.outputs import AttentionRecompute
from megatron_epp.layers.window import attend_window, attend_window_backward


class PartsAttention:
    """Attention of chunks by torch's CPU kernels, which return their log-sum-exp.

    Args:
        scale: scale of the logits.
        before: number of earlier tokens that a query sees (window); None for all.
        sinks: function that returns the logits [H] of the heads' sinks, or None without sinks.
    """

    name = "torch"
    stores_last_slice = False

    def __init__(
        self,
        scale: float,
        before: int | None = None,
        sinks: Callable[[], Tensor | None] = lambda: None,
    ):
        self.scale, self.before, self.sinks = scale, before, sinks

    @property
    def all_heads(self) -> "PartsAttention":
        """This object, because it supports any number of heads."""
        return self

    def of_layer(self, before: int | None, sinks: Callable[[], Tensor | None]) -> "PartsAttention":
        """Return this attention for a layer with the window ``before`` and the ``sinks``."""
        return PartsAttention(self.scale, before, sinks)

    def __call__(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, state: ChunkState, layer: int, drop: bool
    ) -> tuple[Tensor, AttentionRecompute | None]:
        """Return the output [T, H, D] and, if ``drop``, a handle that recomputes it in backward."""
        recompute = AttentionRecompute() if drop else None
        inputs = q_THD, k_TGD, v_TGD, state, layer, self.scale, recompute, self.before, self.sinks()
        return ChunkAttention.apply(*inputs), recompute


class ChunkAttention(torch.autograd.Function):
    """Autograd function of a chunk's attention.

    Forward caches a slice's K/V in the K/V store if later slices need them. Backward adds the
    gradients of the context's K/V to the store. The gradients of a slice's K/V include the
    gradients that later slices added to the store. After the backward of a document's first slice,
    the document's buffer is freed.

    Shape suffixes: T rows of the chunk, H query heads, G key heads, D head size (v and output may
    differ).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        state: ChunkState,
        layer: int,
        scale: float,
        recompute: AttentionRecompute | None = None,
        before: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return the output [T, H, D] of the chunk."""
        store = state.store
        seeing = _Seeing(scale, before, None if sinks_H is None else sinks_H.detach())
        # The value is a view of the fused QKV projection's output. Saving the view would keep
        # queries and keys before the rotary embedding alive.
        v_TGD = v_TGD.contiguous()
        for rows in state.rows:
            local = slice(rows.start, rows.stop)
            if rows.cut and not rows.last and before is None:
                store.append(layer, rows.span.document, rows.span.start, k_TGD[local], v_TGD[local])
            elif rows.cut and not rows.last:
                seeing.tails(state, layer, rows).keep(k_TGD, v_TGD)
        out_THD, lse_TH = _attend_rows(q_THD, k_TGD, v_TGD, state, layer, seeing)
        let_go(state, layer)
        ctx.state, ctx.layer, ctx.seeing = state, layer, seeing
        # The rows of a single slice are in the store, and are not saved again.
        alone = len(state.rows) == 1 and state.rows[0].cut and not state.rows[0].last
        ctx.kept = alone and before is None
        ctx.recompute = recompute
        result = (out_THD, lse_TH) if recompute is None else ()
        if recompute is not None:
            recompute.of(ctx, _recomputed)
        ctx.save_for_backward(q_THD, *result, *(() if ctx.kept else (k_TGD, v_TGD)))
        return out_THD

    @staticmethod
    def inputs(ctx: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return q, k, v and the other saved tensors; k and v may be views of the K/V store."""
        q_THD, *saved = ctx.saved_tensors
        if ctx.kept:
            span = ctx.state.rows[0].span
            k_TGD, v_TGD = ctx.state.store.context(ctx.layer, span.document, span.stop, span.start)
            return q_THD, k_TGD, v_TGD, saved
        return q_THD, saved[-2], saved[-1], saved[:-2]

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor):
        """Return the gradients of q, k, v and the sinks."""
        state, layer, seeing = ctx.state, ctx.layer, ctx.seeing
        store, scale = state.store, seeing.scale
        q_THD, k_TGD, v_TGD, saved = ChunkAttention.inputs(ctx)
        if ctx.recompute is None:
            out_THD, lse_TH = saved
        else:
            out_THD, lse_TH = ctx.recompute.taken()
        padded = q_THD.shape[0]
        dq_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
        dk_TGD, dv_TGD = (t.new_empty(padded, *t.shape[1:]) for t in (k_TGD, v_TGD))
        for local, document, stop in seeing.contexts(state):
            grad, q, out = grad_THD[local], q_THD[local], out_THD[local]
            k, v = store.context(layer, document, stop)
            dq, dk, dv = attend_backward(grad, q, k, v, out, lse_TH[local].T, False, scale)
            dq_THD[local] += dq
            store.add_gradient(layer, document, dk, dv)
        # branches come after the rows of the chunk that they continue
        for rows in reversed(state.rows):
            local = slice(rows.start, rows.stop)
            grad, q, out = grad_THD[local], q_THD[local], out_THD[local]
            lse_HT = lse_TH[local].transpose(0, 1)
            span = rows.span
            if seeing.before is not None:
                gradients = _window_backward(
                    grad, q, k_TGD[local], v_TGD[local], out, lse_HT, state, layer, rows, seeing
                )
                dq_THD[local], dk_TGD[local], dv_TGD[local] = gradients
                continue
            dq, dk, dv = attend_backward(
                grad, q, k_TGD[local], v_TGD[local], out, lse_HT, True, scale
            )
            dq_THD[local] += dq
            dk_TGD[local], dv_TGD[local] = dk, dv
            if rows.cut and not rows.last:
                dk_later, dv_later = store.gradient(layer, span.document, span.start, span.stop)
                dk_TGD[local] += dk_later
                dv_TGD[local] += dv_later
            if rows.cut and span.start == 0:
                store.release(layer, span.document)
        used = state.used
        for gradient in (dq_THD, dk_TGD, dv_TGD):
            gradient[used:] = 0
        dsinks_H = None
        if seeing.sinks_H is not None and ctx.needs_input_grad[8]:
            lse_HT = lse_TH[:used].transpose(0, 1)
            rows_THD = grad_THD[:used], out_THD[:used]
            dsinks_H = sinks_gradient(*rows_THD, lse_HT, seeing.sinks_H).to(seeing.sinks_H.dtype)
        return dq_THD, dk_TGD, dv_TGD, None, None, None, None, None, dsinks_H


def _recomputed(ctx: Any) -> tuple[Tensor, Tensor]:
    """Recompute the output and log-sum-exp of a forward that dropped them."""
    q_THD, k_TGD, v_TGD, _ = ChunkAttention.inputs(ctx)
    return _attend_rows(q_THD, k_TGD, v_TGD, ctx.state, ctx.layer, ctx.seeing)


@dataclass(frozen=True, slots=True)
class _Seeing:
    """Scale, window (``before`` earlier tokens, or all) and sinks of a layer's attention."""

    scale: float
    before: int | None
    sinks_H: Tensor | None

    def contexts(self, state: ChunkState) -> list[tuple[slice, int, int]]:
        """Return (rows, document, tokens of it) of the contexts of a chunk; [] with a window."""
        return [] if self.before is not None else state.once("contexts", lambda: _contexts(state))

    def tails(self, state: ChunkState, layer: int, rows: Rows) -> SliceTails:
        assert self.before is not None, "a layer without a window keeps all rows"
        return SliceTails(state.store, layer, rows, self.before)


def _contexts(state: ChunkState) -> list[tuple[slice, int, int]]:
    """Return each context once for all consecutive spans that attend to it."""
    contexts: list[tuple[slice, int, int]] = []
    reaching: dict[tuple[int, int], int] = {}  # indices in ``contexts``, of the span before
    for rows in state.rows:
        before, reaching = reaching, {}
        for context in rows.context:
            reaching[context] = before.get(context, len(contexts))
            if context not in before:
                contexts.append((slice(rows.start, rows.stop), *context))
            else:
                first, document, tokens = contexts[before[context]]
                contexts[before[context]] = slice(first.start, rows.stop), document, tokens
    return contexts


def _window(
    q: Tensor, k: Tensor, v: Tensor, state: ChunkState, layer: int, rows: Rows, seeing: _Seeing
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a span that sees itself and context, within a window."""
    assert seeing.before is not None
    context = seeing.tails(state, layer, rows).context()
    if context is None and len(q) <= seeing.before + 1:
        return attend(q, k, v, True, seeing.scale)  # all of it is within one window
    context = (k[:0], v[:0]) if context is None else context
    return attend_window(q, k, v, context, seeing.before, seeing.scale)


def _window_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_HT: Tensor,
    state: ChunkState,
    layer: int,
    rows: Rows,
    seeing: _Seeing,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a span's q, k and v in a sliding-window layer.

    The gradients of the context are added to the K/V store. The result includes the gradients that
    later slices stored for the span's last rows.
    """
    assert seeing.before is not None
    tails, scale = seeing.tails(state, layer, rows), seeing.scale
    context, front = tails.context(), None
    if context is None and len(q) <= seeing.before + 1:
        dq, dk, dv = attend_backward(grad, q, k, v, out, lse_HT, True, scale)
    else:
        seen = (k[:0], v[:0]) if context is None else context
        dq, dk, dv, *of_context = attend_window_backward(
            grad, q, k, v, seen, out, lse_HT, seeing.before, scale
        )
        front = None if context is None else (of_context[0], of_context[1])
    if rows.cut or rows.prefix:
        tails.hand_over((dk, dv), front)
    return dq, dk, dv


def _attend_rows(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, state: ChunkState, layer: int, seeing: _Seeing
) -> tuple[Tensor, Tensor]:
    """Return output [T, H, D] and log-sum-exp [T, H] of all spans, each with its context."""
    out_THD = q_THD.new_empty(*q_THD.shape[:2], v_TGD.shape[2])
    lse_dtype = torch.promote_types(q_THD.dtype, torch.float32)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=lse_dtype, device=q_THD.device)
    for rows in state.rows:
        local = slice(rows.start, rows.stop)
        q, k, v = q_THD[local], k_TGD[local], v_TGD[local]
        if seeing.before is not None:
            out, lse = _window(q, k, v, state, layer, rows, seeing)
        else:
            out, lse = attend(q, k, v, True, seeing.scale)
        out_THD[local], lse_TH[local] = out, lse.T
    for local, document, stop in seeing.contexts(state):
        context = state.store.context(layer, document, stop)
        other = attend(q_THD[local], *context, False, seeing.scale)
        out, lse = merged(out_THD[local], lse_TH[local].T, *other)
        out_THD[local], lse_TH[local] = out, lse.T
    used = state.used
    if seeing.sinks_H is not None:
        out, lse = with_sinks(out_THD[:used], lse_TH[:used].T, seeing.sinks_H)
        out_THD[:used], lse_TH[:used] = out, lse.T
    out_THD[used:] = 0  # padding
    return out_THD, lse_TH
