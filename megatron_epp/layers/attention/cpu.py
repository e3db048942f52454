"""Attention of a chunk: every document within itself, a slice also over its kept context.

    rows of the chunk        keys
                     context (store)      own rows
    slice of doc 0  [################]  [#          ]
                    [################]  [##         ]
    doc 1                               [    #      ]
                                        [    ##     ]
    doc 2                               [       #   ]

Nothing else is computed: no document sees another, no masked-out part of the context is touched.
A slice's context part (no mask) and its own part (causal) are computed apart and merged by their
log-sum-exp; their gradients follow from the merged one.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.attention.cpu_flash import attend, attend_backward
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.recompute.outputs import AttendAgain


class PartsAttention:
    """Attention of chunks by kernels that give their log-sum-exp: torch's for the CPU."""

    name = "torch"
    keeps_last = False

    def __init__(self, scale: float):
        self.scale = scale

    def __call__(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, state: ChunkState, layer: int, drop: bool
    ) -> tuple[Tensor, AttendAgain | None]:
        """The output [T, H, D]; where it is to be dropped, also the promise to make it again."""
        again = AttendAgain() if drop else None
        return ChunkAttention.apply(q_THD, k_TGD, v_TGD, state, layer, self.scale, again), again


class ChunkAttention(torch.autograd.Function):
    """T rows of the chunk, H query heads, G key heads, D head size, P inputs before a slice.

    Forward keeps a slice's K and V in the store where later slices will want them. Backward adds
    the gradients of the context's K and V to the store, and to its own rows' what later slices
    left there; after a document's first slice its layer is freed.
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
        again: AttendAgain | None = None,
    ) -> Tensor:
        store = state.store
        # The value arrives as a view of the fused QKV projection's output: saved as it is, it
        # would keep the queries and keys of before the rotary embedding alive with it.
        v_TGD = v_TGD.contiguous()
        out_THD, lse_TH = _attend_rows(q_THD, k_TGD, v_TGD, state, layer, scale)
        for rows in state.rows:
            mine = slice(rows.start, rows.stop)
            if rows.cut and not rows.last:
                store.append(layer, rows.span.document, rows.span.start, k_TGD[mine], v_TGD[mine])
            elif rows.cut and not state.training:
                store.release(layer, rows.span.document)
        ctx.state, ctx.layer, ctx.scale = state, layer, scale
        # The rows of a lone slice are in the store: what is there is not saved again.
        ctx.kept = len(state.rows) == 1 and state.rows[0].cut and not state.rows[0].last
        ctx.again = again
        result = (out_THD, lse_TH) if again is None else ()
        if again is not None:
            again.of(ctx, _once_more)
        ctx.save_for_backward(q_THD, *result, *(() if ctx.kept else (k_TGD, v_TGD)))
        return out_THD

    @staticmethod
    def inputs(ctx: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """q, k, v and what else forward saved, whatever is kept in the store."""
        q_THD, *saved = ctx.saved_tensors
        if ctx.kept:
            span = ctx.state.rows[0].span
            k_TGD, v_TGD = ctx.state.store.context(ctx.layer, span.document, span.stop, span.start)
            return q_THD, k_TGD, v_TGD, saved
        return q_THD, saved[-2], saved[-1], saved[:-2]

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor):
        state, layer, scale = ctx.state, ctx.layer, ctx.scale
        store = state.store
        q_THD, k_TGD, v_TGD, saved = ChunkAttention.inputs(ctx)
        if ctx.again is None:
            out_THD, lse_TH = saved
        else:
            out_THD, lse_TH = ctx.again.result()
            ctx.again.forget()
            ctx.again = None
        padded = q_THD.shape[0]
        dq_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        dk_TGD, dv_TGD = (t.new_empty(padded, *t.shape[1:]) for t in (k_TGD, v_TGD))
        for rows in state.rows:
            mine = slice(rows.start, rows.stop)
            grad, q, out = grad_THD[mine], q_THD[mine], out_THD[mine]
            lse_HT = lse_TH[mine].transpose(0, 1)
            span = rows.span
            dq, dk, dv = attend_backward(
                grad, q, k_TGD[mine], v_TGD[mine], out, lse_HT, True, scale
            )
            dq_THD[mine], dk_TGD[mine], dv_TGD[mine] = dq, dk, dv
            if rows.cut and not rows.last:
                dk_later, dv_later = store.gradient(layer, span.document, span.start, span.stop)
                dk_TGD[mine] += dk_later
                dv_TGD[mine] += dv_later
            if span.start > 0:
                k, v = store.context(layer, span.document, span.start)
                dq, dk, dv = attend_backward(grad, q, k, v, out, lse_HT, False, scale)
                dq_THD[mine] += dq
                store.add_gradient(layer, span.document, dk, dv)
            elif rows.cut:
                store.release(layer, span.document)
        used = state.rows[-1].stop
        for gradient in (dq_THD, dk_TGD, dv_TGD):
            gradient[used:] = 0
        return dq_THD, dk_TGD, dv_TGD, None, None, None, None


def _once_more(ctx: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a forward whose own were dropped."""
    q_THD, k_TGD, v_TGD, _ = ChunkAttention.inputs(ctx)
    return _attend_rows(q_THD, k_TGD, v_TGD, ctx.state, ctx.layer, ctx.scale)


def _attend_rows(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, state: ChunkState, layer: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp [T, H] of every span over its own rows and its context."""
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    lse_dtype = torch.promote_types(q_THD.dtype, torch.float32)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=lse_dtype, device=q_THD.device)
    for rows in state.rows:
        mine = slice(rows.start, rows.stop)
        q, k, v = q_THD[mine], k_TGD[mine], v_TGD[mine]
        out, lse = attend(q, k, v, True, scale)
        if rows.span.start > 0:
            context = state.store.context(layer, rows.span.document, rows.span.start)
            out, lse = _merge(out, lse, *attend(q, *context, False, scale))
        out_THD[mine] = out
        lse_TH[mine] = lse.transpose(0, 1)
    out_THD[state.rows[-1].stop :] = 0  # padding
    return out_THD, lse_TH


def _merge(out_THD: Tensor, lse_HT: Tensor, other_THD: Tensor, other_HT: Tensor):
    """Softmax over two sets of keys from the softmax over each: weights by log-sum-exp."""
    total_HT = torch.logaddexp(lse_HT, other_HT)
    mine_TH1 = (lse_HT - total_HT).exp_().transpose(0, 1)[..., None]
    theirs_TH1 = (other_HT - total_HT).exp_().transpose(0, 1)[..., None]
    merged = out_THD * mine_TH1 + other_THD * theirs_TH1
    return merged.to(out_THD.dtype), total_HT
