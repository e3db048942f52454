"""Merging of attention over two sets of keys by their log-sum-exp, and attention sinks.

A *sink* is an additional logit per head without a value, which takes a part of the softmax. It
needs no kernel: with lse' = log(exp(lse) + exp(sink)) the output is scaled by exp(lse - lse'), and
the backward uses lse' in place of lse.

Shape suffixes: T rows, H heads, D head size.
"""

import torch
from torch import Tensor


def merged(
    out_THD: Tensor, lse_HT: Tensor, other_THD: Tensor, other_HT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return output [T, H, D] and log-sum-exp [H, T] over both sets of keys.

    Args:
        out_THD: [queries, heads, head size] output over the first set.
        lse_HT: [heads, queries] log-sum-exp over the first set.
        other_THD: [queries, heads, head size] output over the second set.
        other_HT: [heads, queries] log-sum-exp over the second set.
    """
    total_HT = torch.logaddexp(lse_HT, other_HT)
    local_TH1 = (lse_HT - total_HT).exp_().transpose(0, 1)[..., None]
    theirs_TH1 = (other_HT - total_HT).exp_().transpose(0, 1)[..., None]
    both_THD = out_THD * local_TH1 + other_THD * theirs_TH1
    return both_THD.to(out_THD.dtype), total_HT


def with_sinks(out_THD: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return output [T, H, D] and log-sum-exp [H, T] with the sinks' part of the softmax."""
    total_HT = torch.logaddexp(lse_HT, sinks_H.to(lse_HT.dtype)[:, None])
    left_TH1 = (lse_HT - total_HT).exp_().transpose(0, 1)[..., None]
    return (out_THD * left_TH1).to(out_THD.dtype), total_HT


def sinks_gradient(grad_THD: Tensor, out_THD: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient [H] of the sinks, in the dtype of ``lse_HT``.

    A sink has no value, so it only scales the outputs. Its gradient is the sum over all rows t of
    -p[t] (out[t] . grad[t]), where p[t] is the sink's softmax probability.

    Args:
        grad_THD: [queries, heads, head size] gradient of the output.
        out_THD: [queries, heads, head size] output, with sinks.
        lse_HT: [heads, queries] log-sum-exp, with sinks.
        sinks_H: [heads] logits of the sinks.
    """
    weights_HT = (sinks_H.to(lse_HT.dtype)[:, None] - lse_HT).exp_()
    gains_TH = torch.einsum("thd,thd->th", grad_THD.to(lse_HT.dtype), out_THD.to(lse_HT.dtype))
    return -(weights_HT * gains_TH.transpose(0, 1)).sum(1)
