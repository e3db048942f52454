"""Attention over two sets of keys from the attention over each, by their log-sum-exp.

A *sink* is a logit of every head beside those of the keys, that no value belongs to: it takes a
part of the softmax. It needs no kernel: with lse' = log(exp(lse) + exp(sink)) the output is
exp(lse - lse') times what it would be, and all gradients follow from lse' as they do from lse.

T rows, H heads, D head size
"""

import torch
from torch import Tensor


def merged(
    out_THD: Tensor, lse_HT: Tensor, other_THD: Tensor, other_HT: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp [H, T] over both: weights by log-sum-exp."""
    total_HT = torch.logaddexp(lse_HT, other_HT)
    local_TH1 = (lse_HT - total_HT).exp_().transpose(0, 1)[..., None]
    theirs_TH1 = (other_HT - total_HT).exp_().transpose(0, 1)[..., None]
    both_THD = out_THD * local_TH1 + other_THD * theirs_TH1
    return both_THD.to(out_THD.dtype), total_HT


def with_sinks(out_THD: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp [H, T] where the heads' sinks take their part, too."""
    total_HT = torch.logaddexp(lse_HT, sinks_H.to(lse_HT.dtype)[:, None])
    left_TH1 = (lse_HT - total_HT).exp_().transpose(0, 1)[..., None]
    return (out_THD * left_TH1).to(out_THD.dtype), total_HT


def sinks_gradient(grad_THD: Tensor, out_THD: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """[H], as wide as ``lse_HT``. A sink adds nothing to the output, so its gradient is its part of
    every row's softmax times what the row would lose. ``lse_HT`` and the output: with the sinks.
    """
    weights_HT = (sinks_H.to(lse_HT.dtype)[:, None] - lse_HT).exp_()
    gains_TH = torch.einsum("thd,thd->th", grad_THD.to(lse_HT.dtype), out_THD.to(lse_HT.dtype))
    return -(weights_HT * gains_TH.transpose(0, 1)).sum(1)
