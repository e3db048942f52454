"""GPU kernels for head sizes that differ between keys and values, or are not multiples of 8.

FlashAttention 2 supports one head size, and all kernels require multiples of 8. Values are padded
with zero channels before the kernel, and the output and gradients are cut afterwards; the K/V store
holds unpadded values. Queries and keys are padded likewise: zeros add nothing to a score.

Shape suffixes: T rows of the chunk, S keys of a call, H query heads, G key heads, D head size, V
head size of values.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from megatron_epp.layers.attention.varlen import Kernel, Operands


class PaddedKernel:
    """Kernel that pads tensors for another kernel.

    Args:
        kernel: kernel for the padded sizes.
        size: padded head size of queries and keys.
        value: padded head size of values.
    """

    def __init__(self, kernel: Kernel, size: int, value: int):
        self.kernel, self.size, self.value = kernel, size, value
        self.name = kernel.name

    def of_layers(self, before: int | None, sinks: bool) -> "PaddedKernel":
        """Return the padded kernel of layers with a window or sinks."""
        return PaddedKernel(self.kernel.of_layers(before, sinks), self.size, self.value)

    def forward(self, call: Operands, backward: bool) -> tuple[Tensor, Any]:
        """Return the output with the values' unpadded head size, and the kernel's state."""
        out_THD, kept = self.kernel.forward(self._padded(call), backward)
        return _cut(out_THD, call.v_SGD), kept

    def backward(self, grad_THV: Tensor, call: Operands, kept: Any) -> tuple[Tensor, ...]:
        """Return the gradients with unpadded head sizes."""
        grad = _wider(grad_THV, self.value)
        dq, dk, dv, *others = self.kernel.backward(grad, self._padded(call), kept)
        return _cut(dq, call.q_THD), _cut(dk, call.k_SGD), _cut(dv, call.v_SGD), *others

    def _padded(self, call: Operands) -> Operands:
        q_THD, k_SGD = (_wider(x, self.size) for x in (call.q_THD, call.k_SGD))
        return replace(call, q_THD=q_THD, k_SGD=k_SGD, v_SGD=_wider(call.v_SGD, self.value))


def _wider(x_THD: Tensor, size: int) -> Tensor:
    missing = size - x_THD.shape[2]
    return pad(x_THD, (0, missing)) if missing else x_THD


def _cut(x_THD: Tensor, like: Tensor) -> Tensor:
    size = like.shape[2]
    return x_THD if x_THD.shape[2] == size else x_THD[..., :size].contiguous()
