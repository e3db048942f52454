"""CPU version of torch's FlashAttention operator, which torch implements only for CUDA.

Causal masks with fewer queries than keys are aligned at the bottom right.
"""

from typing import Any

import torch
from torch import Tensor, library

from tests.engine.attention import fused_attn_bwd, fused_attn_fwd
from tests.engine.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout
from tests.engine.enums import NVTE_Softmax_Type as Softmax
from tests.engine.operands import HALVES, expect

_KEPT: list[library.Library] = []  # a registration lasts as long as its object


def register() -> None:
    """Register the operators for CPU tensors; later calls do nothing."""
    if _KEPT:
        return
    registered = library.Library("aten", "IMPL")
    registered.impl("_flash_attention_forward", _flash_forward, "CPU")
    registered.impl("_flash_attention_backward", _flash_backward, "CPU")
    _KEPT.append(registered)


def _common(
    causal: bool, left: int | None, right: int | None
) -> tuple[Any, Any, Any, tuple[int, int], bool]:
    mask = NVTE_Mask_Type.NVTE_PADDING_MASK
    if causal:
        mask = NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK
    window = (-1 if left is None else left, 0 if causal else (-1 if right is None else right))
    return NVTE_Bias_Type.NVTE_NO_BIAS, mask, Softmax.NVTE_VANILLA_SOFTMAX, window, True


def _checked(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    kernel = "_flash_attention"
    expect(q.dtype in (*HALVES, torch.float64), kernel, f"queries of {q.dtype}")
    size = q.shape[-1]
    expect(size % 8 == 0 and size <= 256, kernel, f"heads of {size}")
    expect(k.shape[-1] == v.shape[-1] == size, kernel, "heads of one size")
    expect(not dropout, kernel, "dropout is not written")


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
    scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _checked(query, key, value, dropout_p)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    thd = NVTE_QKV_Format.NVTE_THD
    out, stats, _ = fused_attn_fwd(
        max_q, max_k, True, scale, 0.0, True, NVTE_QKV_Layout.NVTE_THD_THD_THD, thd, thd,
        *_common(is_causal, window_size_left, window_size_right), cum_seq_q, cum_seq_k,
        query.contiguous(), key.contiguous(), value.contiguous(), query.dtype, None, None, None,
        None, None, None, None, None, None, 0, False, False,
    )  # fmt: skip
    random = torch.zeros(2, dtype=torch.uint64)
    nothing = query.new_empty(0)
    return out, stats[..., 0].T.contiguous(), random, nothing.clone(), nothing


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _checked(query, key, value, dropout_p)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    thd = NVTE_QKV_Format.NVTE_THD
    layout = NVTE_QKV_Layout.NVTE_THD_THD_THD
    dq, dk, dv, *_ = fused_attn_bwd(
        max_q, max_k, scale, 0.0, True, layout, thd, thd, layout, thd, thd,
        *_common(is_causal, window_size_left, window_size_right), False, cum_seq_q, cum_seq_k,
        query.contiguous(), key.contiguous(), value.contiguous(), out.contiguous(),
        grad_out.contiguous(), query.dtype, [logsumexp.T[..., None], rng_state], None, None, None,
        None, None, False,
    )  # fmt: skip
    assert dq is not None and dk is not None and dv is not None
    return dq, dk, dv
