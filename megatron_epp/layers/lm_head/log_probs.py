"""Log-probabilities and entropies from hidden states, with the logits of one block at a time.

    forward    a block of rows: logits -> their log-sum-exp, the label's logit, the mean logit
    backward   recomputed logits -> gradients of hidden states and of the weight

Besides the hidden states, the forward saves the label, log-sum-exp and entropy of every row, and
its temperature if there is one. Because logits are recomputed, there are four matrix products; an
implementation that saves the logits has three.

    log-probability = label's logit - lse        entropy = lse - mean logit under the softmax

Shape suffixes: t rows on this rank, T rows on its tensor-parallel group (as in
layers.lm_head.vocabulary), H hidden size, V vocabulary rows of this rank
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.layers.lm_head.vocabulary import (
    OutputWeightShard,
    log_of_sums,
    softmax_mass,
    statistics_dtype,
)


def block_log_probs(
    hidden_tH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    words: OutputWeightShard,
    temperature_T: Tensor | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [T] of the labels, and entropies [T].

    The results are float32, or float64 for a float64 weight. All ranks of ``words.group`` must run
    the forward and the backward. In backward, all ranks must pass equal gradients, those of the
    full loss.

    Args:
        hidden_tH: [local rows, hidden size] hidden states of this rank's rows.
        weight_VH: [vocabulary rows, hidden size] parameter that gets the gradients; its data are
            ``words.weight_VH``.
        labels_T: [rows] labels of the rows of all ranks of the group.
        words: this rank's vocabulary rows.
        temperature_T: [rows] divisor of each row's logits; None for 1.
        entropy: whether to compute entropies; otherwise they are zeros.
    """
    log_probs_T, entropy_T = _LogProbs.apply(
        hidden_tH, weight_VH, labels_T, words, temperature_T, entropy
    )
    return log_probs_T, entropy_T


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_tH: Tensor,
        weight_VH: Tensor,
        labels_T: Tensor,
        words: OutputWeightShard,
        temperature_T: Tensor | None,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        hidden_TH = words.gathered(hidden_tH).to(words.weight_VH.dtype)
        lse_T = hidden_TH.new_empty(len(hidden_TH), dtype=statistics_dtype(hidden_TH.dtype))
        logit_T, mean_T = torch.empty_like(lse_T), torch.zeros_like(lse_T)
        for block, logits_tV, place_t, met_t in words.blocks(hidden_TH, labels_T, temperature_T):
            logit_t = logits_tV.gather(1, place_t[:, None])[:, 0]
            logit_T[block] = logit_t.masked_fill(~met_t, 0)
            most_t = logits_tV.amax(1)
            below_tV = logits_tV.sub_(most_t[:, None])
            if entropy:
                probabilities_tV = below_tV.exp()
                sum_t = probabilities_tV.sum(1)
                mean_T[block] = probabilities_tV.mul_(below_tV).sum(1) / sum_t + most_t
                del probabilities_tV
            else:
                sum_t = below_tV.exp_().sum(1)
            lse_T[block] = sum_t.log() + most_t
            del logits_tV, below_tV
        if words.ranks > 1:
            own_T, lse_T = lse_T, log_of_sums(lse_T, words)
            mean_T *= softmax_mass(own_T, lse_T, lse_T[:, None])[:, 0]
            both = torch.stack((logit_T, mean_T))
            dist.all_reduce(both, group=words.group)
            logit_T, mean_T = both.unbind()
        entropy_T = lse_T - mean_T if entropy else torch.zeros_like(lse_T)
        ctx.save_for_backward(hidden_tH, weight_VH, labels_T, lse_T, entropy_T, temperature_T)
        ctx.words, ctx.entropy = words, entropy
        return logit_T - lse_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        hidden_tH, weight_VH, labels_T, lse_T, entropy_T, temperature_T = ctx.saved_tensors
        words, dtype = ctx.words, lse_T.dtype
        gradient_T, of_entropy_T = (one.to(dtype) for one in gradients)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_TH = words.gathered(hidden_tH).to(words.weight_VH.dtype)
        hidden_grad_TH = torch.empty_like(hidden_TH) if wants_hidden else None
        # Accumulated in float32: small terms would be lost in a 16-bit sum.
        weight_grad_VH = torch.zeros_like(words.weight_VH, dtype=dtype) if wants_weight else None
        for block, logits_tV, place_t, met_t in words.blocks(hidden_TH, labels_T, temperature_T):
            slope_tV = logits_tV.sub_(lse_T[block, None])
            gradient_t1 = gradient_T[block, None]
            if ctx.entropy:
                probabilities_tV = slope_tV.exp()
                slope_tV.add_(entropy_T[block, None]).mul_(-of_entropy_T[block, None])
                slope_tV.sub_(gradient_t1).mul_(probabilities_tV)
                del probabilities_tV
            else:
                slope_tV.exp_().mul_(-gradient_t1)
            slope_tV.scatter_add_(1, place_t[:, None], gradient_t1 * met_t[:, None])
            if temperature_T is not None:
                slope_tV.div_(temperature_T[block, None])
            slope_tV = slope_tV.to(hidden_TH.dtype)
            if hidden_grad_TH is not None:
                torch.matmul(slope_tV, words.weight_VH, out=hidden_grad_TH[block])
            if weight_grad_VH is not None:
                product_VH = slope_tV.t() @ hidden_TH[block]
                weight_grad_VH += product_VH
                del product_VH
            del logits_tV, slope_tV
        if hidden_grad_TH is not None:
            hidden_grad_TH = words.summed(hidden_grad_TH) if words.ranks > 1 else hidden_grad_TH
            hidden_grad_TH = hidden_grad_TH.to(hidden_tH.dtype)
        if weight_grad_VH is not None:
            weight_grad_VH = weight_grad_VH.to(weight_VH.dtype)
        return hidden_grad_TH, weight_grad_VH, None, None, None, None
