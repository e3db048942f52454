"""Fused LM head and loss, whose backward runs in the forward, so that no logits are saved.

    F   hidden -> logits -> losses, and at once logits -> gradient of hidden     block by block
    B   returns that gradient

The gradient of the total loss with respect to a token's loss is this loss's weight in the total,
which is known before any backward. From F to B, a chunk then saves the gradient [H] of each hidden
state instead of logits over the vocabulary, without additional arithmetic. Gradients of the LM
head's weight accumulate during F.

Shape suffixes: T rows of the chunk, t of them on this rank, H hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.lm_head.vocabulary import row_blocks

# losses(hidden states [t, 1, H], their rows) -> [1, t]
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
    """Return the losses [1, T], and compute the gradient of the hidden states in the forward.

    The backward ignores the gradient of the losses, which must be ``weights_1T``. The forward also
    accumulates the gradients of the weights that ``losses`` uses.

    Args:
        hidden_t1H: [local rows, 1, hidden size] hidden states of this rank's rows.
        weights_1T: [1, rows] weight of every token's loss in the total loss.
        losses: function of (hidden states [n, 1, H], slice of their rows in [0, T)); returns losses
            [1, n].
        block: number of rows whose logits are alive at a time.
        gather: function that all-gathers rows [t, 1, H] to [T, 1, H]; None if t = T.
        scatter: function that reduce-scatters gradients [T, 1, H] to [t, 1, H]; None if t = T.
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
