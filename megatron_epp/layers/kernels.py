"""Attention kernels of torch with their log-sum-exp, forward and backward apart.

T query rows, S key rows, H query heads, G key heads (H a multiple of G), D head size. ``causal``
is for T = S only; both kernels then align it at the top left, which is also the bottom right.
"""

from torch import Tensor, ops


def attend(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, causal: bool, scale: float):
    """Output [T, H, D] and log-sum-exp [H, T] (float32; float64 for float64)."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q_THD, k_SGD, v_SGD))  # [1, H, T, D]
    if q.is_cuda:
        out, lse = ops.aten._scaled_dot_product_flash_attention(
            q, *_expand(q, k, v), 0.0, causal, False, scale=scale
        )[:2]
    else:
        out, lse = ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    return out[0].transpose(0, 1), lse[0]


def attend_backward(grad_THD, q_THD, k_SGD, v_SGD, out_THD, lse_HT, causal: bool, scale: float):
    """Gradients of q, k and v, given the output and log-sum-exp over *all* keys of the row.

    The keys passed may be a part of those that the row attended to: the probabilities follow
    from ``lse_HT``, so the gradients of parts add up to those of the whole.
    """
    grad, q, k, v, out = (t.transpose(0, 1)[None] for t in (grad_THD, q_THD, k_SGD, v_SGD, out_THD))
    if q.is_cuda:
        expanded_k, expanded_v = _expand(q, k, v)
        empty = q.new_empty(0)
        rng = q.new_zeros(2).long()
        dq, dk, dv = ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, expanded_k, expanded_v, out, lse_HT[None].contiguous(), empty, empty,
            q.shape[2], k.shape[2], 0.0, causal, rng, rng, scale=scale,
        )  # fmt: skip
        if k.shape[1] != q.shape[1]:
            dk, dv = (t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (dk, dv))
    else:
        dq, dk, dv = ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse_HT[None], 0.0, causal, scale=scale
        )
    return tuple(t[0].transpose(0, 1) for t in (dq, dk, dv))


def _expand(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Key heads repeated to as many as query heads, which the CUDA kernel wants."""
    repeat = q.shape[1] // k.shape[1]
    if repeat == 1:
        return k, v
    return k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
