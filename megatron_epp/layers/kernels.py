"""Attention kernels of torch for the CPU with their log-sum-exp, forward and backward apart.

T query rows, S key rows, H query heads, G key heads (H a multiple of G), D head size. ``causal``
is for T = S only: the kernel aligns it at the top left, which is then also the bottom right.
"""

from torch import Tensor, ops


def attend(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, causal: bool, scale: float):
    """Output [T, H, D] and log-sum-exp [H, T] (float32; float64 for float64)."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q_THD, k_SGD, v_SGD))  # [1, H, T, D]
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
    gradients = ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse_HT[None], 0.0, causal, scale=scale
    )
    return tuple(t[0].transpose(0, 1) for t in gradients)
