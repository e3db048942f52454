"""Attention over two sets of keys from the attention over each."""

import torch
from torch import Tensor


def merged(
    out_THD: Tensor, lse_HT: Tensor, other_THD: Tensor, other_HT: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] and log-sum-exp [H, T] over both: weights by log-sum-exp."""
    total_HT = torch.logaddexp(lse_HT, other_HT)
    mine_TH1 = (lse_HT - total_HT).exp_().transpose(0, 1)[..., None]
    theirs_TH1 = (other_HT - total_HT).exp_().transpose(0, 1)[..., None]
    both_THD = out_THD * mine_TH1 + other_THD * theirs_TH1
    return both_THD.to(out_THD.dtype), total_HT
