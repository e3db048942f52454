"""Attention by torch's own CUDA kernels: FlashAttention 2, for GPUs without Transformer Engine.

What torch.nn.attention.varlen calls, without the copies that its autograd would keep. Causal
attention with fewer queries than keys is aligned at the bottom right there (FlashAttention 2.1).
"""

from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.attention.varlen import CuSeqlens, Operands

MOST_HEAD_SIZE = 256


class FlashKernel:
    """A :class:`~megatron_epp.layers.attention.varlen.Kernel` for float16 and bfloat16 on CUDA.

    Groups of query heads share their key head inside the kernel.
    """

    name = "torch"

    def __init__(self, scale: float):
        self.scale = scale

    def forward(self, call: Operands, backward: bool) -> tuple[Tensor, Any]:
        out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            *call.tensors,
            *_lengths(call.cu_seqlens),
            0.0,  # dropout
            True,  # causal
            False,  # no debug mask
            scale=self.scale,
        )
        # Detached: the output becomes the result of an autograd function that holds ``kept``.
        return out_THD, (out_THD.detach(), lse_HT) if backward else None

    def backward(
        self, grad_THD: Tensor, call: Operands, kept: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = grad_THD.device
        return torch.ops.aten._flash_attention_backward(
            grad_THD,
            *call.tensors,
            *kept,
            *_lengths(call.cu_seqlens),
            0.0,
            True,
            torch.zeros(2, dtype=torch.uint64, device=device),  # random state of the dropout
            torch.empty(0, device=device),
            scale=self.scale,
        )


def _lengths(cu_seqlens: CuSeqlens) -> tuple[Tensor, Tensor, int, int]:
    return cu_seqlens.queries, cu_seqlens.keys, cu_seqlens.most_queries, cu_seqlens.most_keys
