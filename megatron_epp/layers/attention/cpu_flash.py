"""Attention kernels of torch for the CPU with their log-sum-exp, forward and backward apart.

T query rows, S key rows, H query heads, G key heads (H a multiple of G), D head size, V that of
values: the kernel knows one size, so the smaller ones get channels of zeros on their way into it.
``causal`` is for T = S only: the kernel aligns it at the top left, which is then also the bottom
right.

Without a mask no query minds which others stand beside it, so the H / G query heads that share a
key head are handed over as that many times the queries of G heads. The kernel takes more queries
at a time where there are more (256 from 768 on), so short slices gain.
"""

from torch import Tensor, ops
from torch.nn.functional import pad


def attend(q_THD: Tensor, k_SGD: Tensor, v_SGV: Tensor, causal: bool, scale: float, mask_TS=None):
    """Output [T, H, V] and log-sum-exp [H, T] (float32; float64 for float64).

    ``mask`` is added to the scores, and hides no row entirely.
    """
    tokens, heads, _ = q_THD.shape
    size, q_THD, k_SGD, v_SGV = _of_one_size(q_THD, k_SGD, v_SGV)
    if not causal and mask_TS is None:
        q_THD = _stacked(q_THD, k_SGD.shape[1])
    q, k, v = (t.transpose(0, 1)[None] for t in (q_THD, k_SGD, v_SGV))  # [1, H, T, D]
    out, lse = ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=_of_heads(mask_TS), scale=scale
    )
    return _apart(out[0, ..., :size].transpose(0, 1), heads), lse[0].reshape(heads, tokens)


def attend_backward(
    grad_THV, q_THD, k_SGD, v_SGV, out_THV, lse_HT, causal: bool, scale: float, mask_TS=None
):
    """Gradients of q, k and v, given the output and log-sum-exp over *all* keys of the row.

    The keys passed may be a part of those that the row attended to: the probabilities follow
    from ``lse_HT``, so the gradients of parts add up to those of the whole.
    """
    heads, groups = q_THD.shape[1], k_SGD.shape[1]
    sizes = q_THD.shape[2], k_SGD.shape[2], v_SGV.shape[2]
    _, q_THD, k_SGD, v_SGV, grad_THV, out_THV = _of_one_size(q_THD, k_SGD, v_SGV, grad_THV, out_THV)
    if not causal and mask_TS is None:
        grad_THV, q_THD, out_THV = (_stacked(t, groups) for t in (grad_THV, q_THD, out_THV))
        lse_HT = lse_HT.reshape(groups, -1)
    grad, q, k, v, out = (t.transpose(0, 1)[None] for t in (grad_THV, q_THD, k_SGD, v_SGV, out_THV))
    gradients = ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse_HT[None], 0.0, causal, attn_mask=_of_heads(mask_TS), scale=scale
    )
    dq_THD, dk_SGD, dv_SGV = (  # the kernel's [1, H, T, D] each as [T, H, its own D]
        t[0, ..., :size].transpose(0, 1) for t, size in zip(gradients, sizes, strict=True)
    )
    return _apart(dq_THD, heads), dk_SGD, dv_SGV


def _of_heads(mask_TS: Tensor | None) -> Tensor | None:
    return None if mask_TS is None else mask_TS[None, None]


def _of_one_size(q_THD: Tensor, k_SGD: Tensor, v_SGV: Tensor, *of_values: Tensor):
    """V, and q, k, v and what has v's size, with as many channels each; zeros add nothing to a
    score, nor to the product of a gradient and an output."""
    size, other = v_SGV.shape[2], q_THD.shape[2]
    if size < other:
        wider = (pad(t, (0, other - size)) for t in (v_SGV, *of_values))
        return size, q_THD, k_SGD, *wider
    if size > other:
        q_THD, k_SGD = (pad(t, (0, size - other)) for t in (q_THD, k_SGD))
    return size, q_THD, k_SGD, v_SGV, *of_values


def _stacked(x_THD: Tensor, groups: int) -> Tensor:
    """[T, H, D] as [H / G * T, G, D]: the heads of a group one behind the other."""
    tokens, heads, size = x_THD.shape
    by_group = x_THD.unflatten(1, (groups, heads // groups))
    return by_group.permute(2, 0, 1, 3).reshape(heads // groups * tokens, groups, size)


def _apart(x_NGD: Tensor, heads: int) -> Tensor:
    """The inverse of :func:`_stacked`."""
    return x_NGD.unflatten(0, (heads // x_NGD.shape[1], -1)).permute(1, 2, 0, 3).flatten(1, 2)
