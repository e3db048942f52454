"""Kernels of GPUs for heads whose values have another size than their queries and keys, or a size
that is no multiple of 8.

FlashAttention 2 knows one size. So values get channels of zeros on their way into the kernel, and
the output and their gradients lose them on the way out; in the store they lie as they are. (Queries
and keys that are the shorter ones get them instead: zeros add nothing to a score.)

T rows of the chunk, S keys of a call, H query heads, G key heads, D head size, V that of values.
"""

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from megatron_epp.layers.attention.varlen import Kernel, Operands


class PaddedKernel:
    """``kernel``, which is made for heads of ``size``: the larger one, or more."""

    def __init__(self, kernel: Kernel, size: int):
        self.kernel, self.size = kernel, size
        self.name = kernel.name

    def forward(self, call: Operands, backward: bool) -> tuple[Tensor, Any]:
        out_THD, kept = self.kernel.forward(self._padded(call), backward)
        return _cut(out_THD, call.v_SGD), kept

    def backward(
        self, grad_THV: Tensor, call: Operands, kept: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        padded = self._padded(call)
        grad_THD = _wider(grad_THV, self.size)
        dq, dk, dv = self.kernel.backward(grad_THD, padded, kept)
        return _cut(dq, call.q_THD), _cut(dk, call.k_SGD), _cut(dv, call.v_SGD)

    def _padded(self, call: Operands) -> Operands:
        q_THD, k_SGD, v_SGD = (_wider(x, self.size) for x in call.tensors)
        return Operands(q_THD, k_SGD, v_SGD, call.cu_seqlens)


def _wider(x_THD: Tensor, size: int) -> Tensor:
    missing = size - x_THD.shape[2]
    return pad(x_THD, (0, missing)) if missing else x_THD


def _cut(x_THD: Tensor, like: Tensor) -> Tensor:
    size = like.shape[2]
    return x_THD if x_THD.shape[2] == size else x_THD[..., :size].contiguous()
