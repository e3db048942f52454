"""Compilation of Triton's kernels that permute tokens by expert (--moe-permute-fusion).

Triton compiles a kernel once for multiples of 16 rows, and once for other numbers of rows. It
compiles the kernel of the row map again each time the number of blocks of 1024 rows doubles.
Numbers of rows vary from chunk to chunk, so all variants are compiled before the first iteration.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute

# Numbers of rows with which rows and routed rows (rows x top-k) are and are not multiples of 16.
EITHER = (16, 17, 20, 24)
BLOCK, MOST = 1024, 32768  # rows of a block, and of the largest usual chunks
NARROW = 16  # channels; the row map does not depend on them


def compile_permutations(experts: Any, device: torch.device) -> None:
    """Compile all variants of the permutation kernels of MoE layer ``experts`` by running them."""
    config = experts.config
    if not config.moe_permute_fusion:
        return
    # The flex dispatcher permutes the rows of local experts, other dispatchers those of all.
    flex = hasattr(experts.token_dispatcher, "_comm_manager")
    count = len(experts.local_expert_indices) if flex else config.num_moe_experts
    topk, hidden = min(config.moe_router_topk, count), config.moe_latent_size or config.hidden_size

    def permuted(rows: int, channels: int, backward: bool) -> None:
        tokens = torch.zeros(rows, channels, dtype=config.params_dtype, device=device)
        routing = torch.zeros(rows, count, dtype=torch.bool, device=device)
        routing[:, :topk] = True
        probs = routing.float()
        inputs = [x.requires_grad_(backward) for x in (tokens, probs)]
        routed = {"num_out_tokens": rows * topk, "fused": True}
        output, weights, order, *_ = permute(tokens, routing, probs=probs, **routed)
        if backward:
            back = unpermute(output, order, tokens.shape, routing_map=routing, fused=True)
            torch.autograd.grad(back.float().sum() + weights.sum(), inputs)

    for rows in EITHER:
        permuted(rows, hidden, True)
    size = BLOCK
    while size <= MOST:
        for rows in (size, size - 1):
            permuted(rows, NARROW, False)
        size *= 2
