"""torch's CPU attention kernels with their log-sum-exp, forward and backward.

Shape suffixes: T query rows, S key rows, H query heads, G key heads (H a multiple of G), D head
size, V head size of values. The kernel supports one head size, so the smaller of D and V is padded
with zero channels. The kernel aligns a causal mask at the top left. ``causal`` requires T = S, for
which this is the same as alignment at the bottom right.

Without a mask, queries are independent. The H / G query heads of a key head are then passed as one
head with H / G times as many queries. With 768 or more queries, the kernel processes larger blocks
(256 queries). Short slices are faster because they reach this number.
"""

from torch import Tensor, ops
from torch.nn.functional import pad


def attend(q_THD: Tensor, k_SGD: Tensor, v_SGV: Tensor, causal: bool, scale: float, mask_TS=None):
    """Return output [T, H, V] and log-sum-exp [H, T] (float32; float64 for float64).

    Args:
        q_THD: [queries, heads, head size] queries.
        k_SGD: [keys, groups, head size] keys.
        v_SGV: [keys, groups, value size] values.
        causal: whether to apply a causal mask; requires T = S.
        scale: scale of the logits.
        mask_TS: [queries, keys] mask that is added to the scores; it must not mask a complete row.
            None: no mask besides ``causal``.
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
    """Return the gradients of q, k and v, in their shapes.

    ``k_SGD`` and ``v_SGV`` may be a part of the keys and values that the queries attended to. The
    full gradient of q is then the sum of the results for all parts.

    Args:
        grad_THV: [queries, heads, value size] gradient of the output.
        q_THD: [queries, heads, head size] queries.
        k_SGD: [keys, groups, head size] keys.
        v_SGV: [keys, groups, value size] values.
        out_THV: [queries, heads, value size] output over all keys.
        lse_HT: [heads, queries] log-sum-exp over all keys.
        causal: whether to apply a causal mask; requires T = S.
        scale: scale of the logits.
        mask_TS: [queries, keys] mask that is added to the scores, as in :func:`attend`.
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
    dq_THD, dk_SGD, dv_SGV = (  # from [1, H, T, D] to [T, H, own head size]
        t[0, ..., :size].transpose(0, 1) for t, size in zip(gradients, sizes, strict=True)
    )
    return _apart(dq_THD, heads), dk_SGD, dv_SGV


def _of_heads(mask_TS: Tensor | None) -> Tensor | None:
    return None if mask_TS is None else mask_TS[None, None]


def _of_one_size(q_THD: Tensor, k_SGD: Tensor, v_SGV: Tensor, *of_values: Tensor):
    """Return V, the head size of values, and all tensors padded with zeros to one head size.

    Zeros add nothing to a score, nor to the product of a gradient and an output.
    """
    size, other = v_SGV.shape[2], q_THD.shape[2]
    if size < other:
        wider = (pad(t, (0, other - size)) for t in (v_SGV, *of_values))
        return size, q_THD, k_SGD, *wider
    if size > other:
        q_THD, k_SGD = (pad(t, (0, size - other)) for t in (q_THD, k_SGD))
    return size, q_THD, k_SGD, v_SGV, *of_values


def _stacked(x_THD: Tensor, groups: int) -> Tensor:
    """Return [T, H, D] as [H / G * T, G, D]: query heads of one key head become more rows."""
    tokens, heads, size = x_THD.shape
    by_group = x_THD.unflatten(1, (groups, heads // groups))
    return by_group.permute(2, 0, 1, 3).reshape(heads // groups * tokens, groups, size)


def _apart(x_NGD: Tensor, heads: int) -> Tensor:
    """Return the inverse of :func:`_stacked`."""
    return x_NGD.unflatten(0, (heads // x_NGD.shape[1], -1)).permute(1, 2, 0, 3).flatten(1, 2)
