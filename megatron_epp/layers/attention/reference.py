"""Reference attention: scores, mask and softmax in plain torch.

It computes one head of one document at a time, so it is slow. Products have the operands' dtype
(float32 or float64 to test other kernels, bf16 to measure the effect of rounding); the softmax is
computed in at least float32.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.attention.varlen import CuSeqlens, Operands


class ReferenceKernel:
    """:class:`~megatron_epp.layers.attention.varlen.Kernel` for any device."""

    name = "plain"

    def __init__(self, scale: float, before: int | None = None):
        self.scale, self.before = scale, before

    def of_layers(self, before: int | None, sinks: bool) -> "ReferenceKernel":
        """Return the kernel for a window of ``before`` tokens; every call passes the sinks."""
        return type(self)(self.scale, before)

    def forward(self, call: Operands, backward: bool) -> tuple[Tensor, Any]:
        """Return the output [T, H, D] and None, because the backward recomputes everything."""
        with torch.no_grad():
            q, k, v, *sinks = call.tensors
            return self._attend(q, k, v, call.cu_seqlens, *sinks), None

    def backward(self, grad_THD: Tensor, call: Operands, kept: Any) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, and of the sinks if there are any."""
        tensors = [x.detach().requires_grad_() for x in call.tensors]
        with torch.enable_grad():
            q, k, v, *sinks = tensors
            out_THD = self._attend(q, k, v, call.cu_seqlens, *sinks)
        return torch.autograd.grad(out_THD, tensors, grad_THD)

    def _attend(
        self,
        q_THD: Tensor,
        k_SGD: Tensor,
        v_SGD: Tensor,
        cu_seqlens: CuSeqlens,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        repeat = q_THD.shape[1] // k_SGD.shape[1]
        outputs, query, key = [], 0, 0
        for queries, keys in cu_seqlens.lengths:
            q = q_THD[query : query + queries]
            k, v = (x[key : key + keys].repeat_interleave(repeat, 1) for x in (k_SGD, v_SGD))
            hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
            hidden = hidden.triu(keys - queries + 1)
            if self.before is not None:
                hidden |= torch.ones_like(hidden).tril(keys - queries - self.before - 1)
            heads = [
                self._head(
                    q[:, h], k[:, h], v[:, h], hidden, None if sinks_H is None else sinks_H[h]
                )
                for h in range(q.shape[1])
            ]
            outputs.append(torch.stack(heads, 1))
            query, key = query + queries, key + keys
        return torch.cat(outputs)

    def _head(
        self, q_TD: Tensor, k_SD: Tensor, v_SD: Tensor, hidden_TS: Tensor, sink: Tensor | None
    ) -> Tensor:
        scores_TS = (q_TD @ k_SD.T).masked_fill(hidden_TS, -torch.inf) * self.scale
        dtype = torch.promote_types(scores_TS.dtype, torch.float32)
        if sink is not None:  # an additional key without a value
            sink_T1 = sink.to(dtype).expand(len(scores_TS), 1)
            scores_TS = torch.cat((scores_TS.to(dtype), sink_T1), 1)
        weights_TS = scores_TS.softmax(-1, dtype=dtype)[:, : len(k_SD)]
        return weights_TS.to(v_SD.dtype) @ v_SD
