"""Sinkhorn's balancing of experts, of every document alone, whatever is computed beside it.

    weight_te = d1_e * exp(logit_te) * d0_t     each token of a document, and each expert, weighs
                                                alike in the sum; a token's largest are its experts

Megatron finds d0 and d1 over all rows that one rank has of a micro-batch
(core/transformer/moe/moe_utils.py, ``sinkhorn``). Here every document of a chunk has its own, over
its rows on all ranks, and its iteration ends by itself: what Megatron does on one rank, with one
document a micro-batch.

t rows of a rank, T rows of a chunk, D documents of a chunk, E experts
"""

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.moe.router_stats import Balancing

# Megatron's.
TOLERANCE, LEAST = 1e-4, 1e-8


def balanced_weights(logits_tE: Tensor, state: ChunkState, rules: Balancing) -> Tensor:
    """The weights of this rank's rows, [t, E] float32, of a chunk of whole documents.

    Collective over the ranks that share its rows.
    """
    assert state.local is None, "documents are spread over all ranks"
    logits_tE = logits_tE.detach().to(torch.float32)
    every_TE, first = logits_tE, rules.place * len(logits_tE)
    if rules.group is not None:
        every_TE = logits_tE.new_empty(len(logits_tE) * rules.places, logits_tE.shape[1])
        dist.all_gather_into_tensor(every_TE, logits_tE.contiguous(), group=rules.group)
    owners_T = state.once("documents", lambda: on_device(_owners(state), logits_tE.device))
    return weights(every_TE, owners_T, len(state.rows))[first : first + len(logits_tE)]


def _owners(state: ChunkState) -> Tensor:
    """The place in the chunk of each row's document; of padding: their number. [T] int64"""
    owners_T = numpy.full(state.tokens, len(state.rows), dtype=numpy.int64)
    for place, rows in enumerate(state.rows):
        owners_T[rows.start : rows.stop] = place
    return torch.from_numpy(owners_T)


def weights(logits_TE: Tensor, owners_T: Tensor, documents: int) -> Tensor:
    """[T, E] of the rows of D ``documents``, each balanced alone; rows owned by none are not."""
    cost_TE = torch.exp(logits_TE)
    # A document's sums as one product: adding up by index is in no fixed order on GPUs, and a
    # layer that is recomputed must choose again what it chose. The last one is padding.
    which_D = torch.arange(documents + 1, device=logits_TE.device)
    member_DT = (owners_T == which_D[:, None]).to(cost_TE.dtype)
    fraction_T = (1 / member_DT.sum(1).clamp(min=1)).index_select(0, owners_T)
    d0_T = torch.ones_like(fraction_T)
    d1_DE = torch.ones_like(cost_TE[:1]).repeat(documents + 1, 1)
    moving_D = which_D < documents
    while bool(moving_D.any()):
        scaled_T = (d1_DE.index_select(0, owners_T) * cost_TE).sum(1)
        next0_T = fraction_T / (scaled_T + LEAST)
        next1_DE = 1 / d1_DE.shape[1] / (member_DT @ (next0_T[:, None] * cost_TE) + LEAST)
        moved_D = (d1_DE - next1_DE).abs().mean(1)
        d0_T = torch.where(moving_D.index_select(0, owners_T), next0_T, d0_T)
        d1_DE = torch.where(moving_D[:, None], next1_DE, d1_DE)
        moving_D = moving_D & (moved_D > TOLERANCE)
    return d1_DE.index_select(0, owners_T) * cost_TE * d0_T[:, None]
