"""Attention by torch's CUDA kernels (FlashAttention 2), for GPUs without Transformer Engine.

These are the operators of torch.nn.attention.varlen, without the copies that torch's autograd
function would save. Causal masks with fewer queries than keys are aligned at the bottom right
(FlashAttention 2.1), and so are windows. The sinks' part of the softmax is merged after the kernel
(merge.py): the forward returns a log-sum-exp, and the merged log-sum-exp is passed to the backward.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.attention.merge import sinks_gradient, with_sinks
from megatron_epp.layers.attention.varlen import CuSeqlens, Operands

MOST_HEAD_SIZE = 256


class FlashKernel:
    """:class:`~megatron_epp.layers.attention.varlen.Kernel` for float16 and bfloat16 on CUDA.

    Groups of query heads share their key head inside the kernel.
    """

    name = "torch"

    def __init__(self, scale: float, before: int | None = None):
        self.scale, self.before = scale, before
        self._window: dict[str, int] = (
            {} if before is None else {"window_size_left": before, "window_size_right": 0}
        )

    def of_layers(self, before: int | None, sinks: bool) -> "FlashKernel":
        """Return the kernel of layers with a window of ``before`` tokens; None for no window.

        Sinks are applied outside of the kernel.
        """
        return FlashKernel(self.scale, before)

    def forward(self, call: Operands, backward: bool) -> tuple[Tensor, Any]:
        """Return the output [T, H, D] and, if ``backward``, the pair (output, log-sum-exp)."""
        out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            call.q_THD,
            call.k_SGD,
            call.v_SGD,
            *_lengths(call.cu_seqlens),
            0.0,  # dropout
            True,  # causal
            False,  # no debug mask
            scale=self.scale,
            **self._window,
        )
        if call.sinks_H is not None:
            out_THD, lse_HT = with_sinks(out_THD, lse_HT, call.sinks_H)
        # Detached: the output is the result of an autograd function that holds ``kept``.
        return out_THD, (out_THD.detach(), lse_HT) if backward else None

    def backward(self, grad_THD: Tensor, call: Operands, kept: Any) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, and of the sinks if there are any."""
        device = grad_THD.device
        gradients = torch.ops.aten._flash_attention_backward(
            grad_THD,
            call.q_THD,
            call.k_SGD,
            call.v_SGD,
            *kept,
            *_lengths(call.cu_seqlens),
            0.0,
            True,
            torch.zeros(2, dtype=torch.uint64, device=device),  # random state of the dropout
            torch.empty(0, device=device),
            scale=self.scale,
            **self._window,
        )
        if call.sinks_H is None:
            return gradients
        out_THD, lse_HT = kept
        return *gradients, sinks_gradient(grad_THD, out_THD, lse_HT, call.sinks_H)


def _lengths(cu_seqlens: CuSeqlens) -> tuple[Tensor, Tensor, int, int]:
    return cu_seqlens.queries, cu_seqlens.keys, cu_seqlens.most_queries, cu_seqlens.most_keys
