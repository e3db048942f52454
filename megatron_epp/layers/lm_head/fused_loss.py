"""Output layer and loss whose backward runs with their forward, so that no logits are kept.

    F   hidden -> logits -> losses, and at once logits -> gradient of hidden     block by block
    B   hands that gradient on

The gradient of a token's loss is known before any backward: its weight in the sum. What a chunk
keeps from F to B is then one hidden state per token, where it was a vocabulary of logits; no
arithmetic is added. Gradients of the output layer's weight add up while F runs.

T rows of the chunk, t of them here, H hidden size
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.lm_head.vocabulary import row_blocks

# losses(rows of hidden [t, 1, H], which rows) -> [1, t]
Losses = Callable[[Tensor, slice], Tensor]
Exchange = Callable[[Tensor], Tensor]


def fused_backward(
    hidden_t1H: Tensor,
    weights_1T: Tensor,
    losses: Losses,
    block: int,
    gather: Exchange | None = None,
    scatter: Exchange | None = None,
) -> Tensor:
    """Losses [1, T] of ``hidden``, whose backward must come with the gradient ``weights``.

    ``block`` rows at a time: more logits than that never live. Where other ranks hold the other
    rows of the chunk, ``gather`` [t, 1, H] -> [T, 1, H] brings them, once, and ``scatter`` [T, 1,
    H] -> [t, 1, H] adds up every rank's share of their gradients.
    """
    return _FusedBackward.apply(hidden_t1H, weights_1T, losses, block, gather, scatter)


class _FusedBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_t1H: Tensor,
        weights_1T: Tensor,
        losses: Losses,
        block: int,
        gather: Exchange | None,
        scatter: Exchange | None,
    ) -> Tensor:
        hidden_T1H = hidden_t1H if gather is None else gather(hidden_t1H.detach())
        total = hidden_T1H.shape[0]
        gradient_T1H = torch.empty_like(hidden_T1H)
        blocks = []
        for rows in row_blocks(total, block):
            part = hidden_T1H[rows].detach().requires_grad_()
            with torch.enable_grad():
                losses_1t = losses(part, rows)
            torch.autograd.backward(losses_1t, weights_1T[:, rows].to(losses_1t.dtype))
            assert part.grad is not None, "the losses do not depend on the hidden states"
            gradient_T1H[rows] = part.grad
            blocks.append(losses_1t.detach())
        ctx.save_for_backward(gradient_T1H if scatter is None else scatter(gradient_T1H))
        return torch.cat(blocks, 1)

    @staticmethod
    def backward(ctx: Any, _: Tensor):
        (gradient_t1H,) = ctx.saved_tensors
        return gradient_t1H, None, None, None, None, None
