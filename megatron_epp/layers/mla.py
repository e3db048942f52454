"""Multi-latent attention of a slice whose context is cached as latents.

    cached per token     latent [R] and rotated key [P], independent of the number of heads H
    per context block    K = [latent U_K | rotated key for every head]      [S, H, D]
                         V = latent U_V                                     [S, H, V]

U = [U_K | U_V] is the up-projection. For the chunk's rows, the caller has computed K and V. The
context is processed in blocks; K and V of only one block are alive at a time, in forward and
backward. The outputs of attention to the slice's own rows and to each block are merged by their
log-sum-exp, as in cpu.py.

    forward     out, lse = attend to own rows; for block in context: merge with attend(q, K, V)
    backward    for block in context: compute dK, dV; dU += [dK | dV]^T latent;
                add [dK | dV] U and the sum of dK's rotary part over heads to the store's gradients

With tensor parallelism, each rank has some of the heads. The gradients of latents then include only
this rank's heads, and the caller reduces them over the ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_epp.layers.attention.cpu_flash import attend, attend_backward
from megatron_epp.layers.attention.merge import merged
from megatron_epp.layers.chunk_state import ChunkState, Rows, let_go
from megatron_epp.layers.recompute.outputs import AttentionRecompute

BLOCK = 2048  # number of context tokens whose K and V are alive at a time


@dataclass(frozen=True, slots=True)
class LatentKV:
    """Tensors from which K and V of a chunk are computed.

    T rows, R latent channels, P rotary channels, H heads of this rank. Q and K have D channels per
    head, of which P are rotary; V has V channels per head.

    Attributes:
        latent_T1R: latents after their norm, the inputs of the up-projection.
        rotary_T1P: keys with rotary embedding, shared by all heads.
        weight_NR: up-projection of this rank's heads, N = H (D - P + V); for each head the rows of
            K precede the rows of V.
    """

    latent_T1R: Tensor
    rotary_T1P: Tensor
    weight_NR: Tensor


class LatentKVAttention:
    """Attention of chunks by torch's CPU kernels, with cached latents in place of K and V."""

    name = "torch"
    stores_last_slice = False

    def __init__(self, scale: float):
        self.scale = scale

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THV: Tensor,
        latent_kv: LatentKV,
        state: ChunkState,
        layer: int,
        drop: bool,
    ) -> tuple[Tensor, AttentionRecompute | None]:
        """Compute the attention of all rows of the chunk.

        Args:
            q_THD: queries [T, H, D].
            k_THD: keys [T, H, D] of the chunk's rows.
            v_THV: values [T, H, V] of the chunk's rows.
            latent_kv: latents and keys to store for later slices; up-projection of the context.
            state: state of the chunk.
            layer: number of the layer in the stage.
            drop: whether the output is dropped after its use, and recomputed for the backward.

        Returns:
            The output [T, H, V] and, with ``drop``, the handle that recomputes it.
        """
        recompute = AttentionRecompute() if drop else None
        of_latent = latent_kv.latent_T1R, latent_kv.rotary_T1P, latent_kv.weight_NR
        inputs = q_THD, k_THD, v_THV, *of_latent, state, layer, self.scale, recompute
        return _AttendLatentKV.apply(*inputs), recompute


class _AttendLatentKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THV: Tensor,
        latent_T1R: Tensor,
        rotary_T1P: Tensor,
        weight_NR: Tensor,
        state: ChunkState,
        layer: int,
        scale: float,
        recompute: AttentionRecompute | None,
    ) -> Tensor:
        ctx.state, ctx.layer, ctx.scale, ctx.recompute = state, layer, scale, recompute
        store = state.store
        for rows in state.rows:
            local, document = slice(rows.start, rows.stop), rows.span.document
            if rows.cut and not rows.last:
                parts = latent_T1R[local], rotary_T1P[local]
                store.append(layer, document, rows.span.start, *parts)
        out_THV, lse_TH = _attend_rows(q_THD, k_THD, v_THV, weight_NR, ctx)
        let_go(state, layer)
        result = (out_THV, lse_TH) if recompute is None else ()
        if recompute is not None:
            recompute.of(ctx, _recomputed)
        ctx.save_for_backward(q_THD, k_THD, v_THV, weight_NR, *result)
        ctx.sizes = latent_T1R.shape, rotary_T1P.shape
        return out_THV

    @staticmethod
    def backward(ctx: Any, grad_THV: Tensor):
        state, layer, scale = ctx.state, ctx.layer, ctx.scale
        q_THD, k_THD, v_THV, weight_NR, *result = ctx.saved_tensors
        if ctx.recompute is not None:
            result = ctx.recompute.taken()
        out_THV, lse_TH = result
        store = state.store
        gradients = tuple(torch.empty_like(t) for t in (q_THD, k_THD, v_THV))
        own = tuple(grad_THV.new_zeros(size) for size in ctx.sizes)
        dweight_NR = None
        if ctx.needs_input_grad[5]:
            dtype = torch.promote_types(weight_NR.dtype, torch.float32)
            dweight_NR = torch.zeros_like(weight_NR, dtype=dtype)
        for rows in reversed(state.rows):
            local, span = slice(rows.start, rows.stop), rows.span
            q, out, grad = q_THD[local], out_THV[local], grad_THV[local]
            lse_HT = lse_TH[local].transpose(0, 1)
            part_gradients = attend_backward(
                grad, q, k_THD[local], v_THV[local], out, lse_HT, True, scale
            )
            for gradient, part in zip(gradients, part_gradients, strict=True):
                gradient[local] = part
            if rows.cut and not rows.last:
                later = store.gradient(layer, span.document, span.start, span.stop)
                for gradient, part in zip(own, later, strict=True):
                    gradient[local] = part
            for document, inputs in rows.context:
                context = store.context(layer, document, inputs)
                to_store = tuple(torch.empty_like(t) for t in context)
                for block in _blocks(inputs):
                    k, v = _expanded(context, block, weight_NR, v_THV)
                    dq, dk, dv = attend_backward(grad, q, k, v, out, lse_HT, False, scale)
                    gradients[0][local] += dq
                    head = k.shape[2] - to_store[1].shape[2]  # channels of the up-projection
                    to_store[1][block] = dk[..., head:].sum(1, keepdim=True)
                    dkv_SN = torch.cat((dk[..., :head], dv), -1).flatten(1)
                    to_store[0][block, 0] = dkv_SN @ weight_NR
                    if dweight_NR is not None:
                        dweight_NR += dkv_SN.t() @ context[0][block, 0]
                store.add_gradient(layer, document, *to_store)
            if rows.cut and span.start == 0:
                store.release(layer, span.document)
        used = state.rows[-1].stop
        for gradient in gradients:
            gradient[used:] = 0
        if dweight_NR is not None:
            dweight_NR = dweight_NR.to(weight_NR.dtype)
        return *gradients, *own, dweight_NR, None, None, None, None


def _recomputed(ctx: Any) -> tuple[Tensor, Tensor]:
    """Recompute the output and log-sum-exp of a forward that dropped them."""
    q_THD, k_THD, v_THV, weight_NR = ctx.saved_tensors
    return _attend_rows(q_THD, k_THD, v_THV, weight_NR, ctx)


def _attend_rows(
    q_THD: Tensor, k_THD: Tensor, v_THV: Tensor, weight_NR: Tensor, ctx: Any
) -> tuple[Tensor, Tensor]:
    """Return output [T, H, V] and log-sum-exp [T, H]; a span attends to its context and itself."""
    state: ChunkState = ctx.state
    out_THV = q_THD.new_empty(*q_THD.shape[:2], v_THV.shape[2])
    dtype = torch.promote_types(q_THD.dtype, torch.float32)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=dtype, device=q_THD.device)
    for rows in state.rows:
        local = slice(rows.start, rows.stop)
        q = q_THD[local]
        out, lse = attend(q, k_THD[local], v_THV[local], True, ctx.scale)
        for k, v in _context(rows, weight_NR, v_THV, ctx):
            out, lse = merged(out, lse, *attend(q, k, v, False, ctx.scale))
        out_THV[local] = out
        lse_TH[local] = lse.transpose(0, 1)
    out_THV[state.rows[-1].stop :] = 0  # padding
    return out_THV, lse_TH


def _context(
    rows: Rows, weight_NR: Tensor, v_THV: Tensor, ctx: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield K and V of the slice's context, block by block."""
    for document, inputs in rows.context:
        context = ctx.state.store.context(ctx.layer, document, inputs)
        for block in _blocks(inputs):
            yield _expanded(context, block, weight_NR, v_THV)


def _blocks(tokens: int) -> Iterator[slice]:
    for start in range(0, tokens, BLOCK):
        yield slice(start, min(start + BLOCK, tokens))


def _expanded(
    context: tuple[Tensor, Tensor], block: slice, weight_NR: Tensor, v_THV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return K [S, H, D] and V [S, H, V] of a block of cached latents and rotated keys."""
    latent_S1R, rotary_S1P = (t[block] for t in context)
    heads, value = v_THV.shape[1:]
    expanded_SHN = linear(latent_S1R[:, 0], weight_NR).unflatten(-1, (heads, -1))
    key_SHD = torch.cat((expanded_SHN[..., :-value], rotary_S1P.expand(-1, heads, -1)), -1)
    return key_SHD, expanded_SHN[..., -value:]
