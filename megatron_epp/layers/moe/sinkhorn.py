"""Sinkhorn balancing of experts for every document individually.

    weight_te = d1_e * exp(logit_te) * d0_t     d0 and d1 make the sums equal for all tokens, and
                                                for all experts; a token chooses the experts with
                                                its largest weights

Megatron computes d0 and d1 over all rows of a micro-batch on one rank
(core/transformer/moe/moe_utils.py, ``sinkhorn``). Here they are computed for each document of a
chunk, over the document's rows on all ranks. The Sinkhorn iteration of a document ends when
this document has converged. The result equals Megatron's result on one rank with one document per
micro-batch.

t rows of a rank, T rows of a chunk, D documents of a chunk, E experts
"""

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.moe.router_stats import Balancing

# As in Megatron.
TOLERANCE, LEAST = 1e-4, 1e-8


def balanced_weights(logits_tE: Tensor, state: ChunkState, rules: Balancing) -> Tensor:
    """Return Sinkhorn weights of this rank's rows: float32 [t, E].

    The chunk's documents must be unsliced. Collective: the logits are all-gathered over the
    ranks that shard the chunk's rows.
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
    """Return the document of each row as an index within the chunk: int64 [T]; D for padding."""
    owners_T = numpy.full(state.tokens, len(state.rows), dtype=numpy.int64)
    for place, rows in enumerate(state.rows):
        owners_T[rows.start : rows.stop] = place
    return torch.from_numpy(owners_T)


def weights(logits_TE: Tensor, owners_T: Tensor, documents: int) -> Tensor:
    """Return the Sinkhorn weights [T, E] of all rows; each document is balanced individually.

    Args:
        logits_TE: logits.
        owners_T: index of each row's document; ``documents`` for padding, which is not balanced.
        documents: number of documents.
    """
    cost_TE = torch.exp(logits_TE)
    # Sums per document as one product. Index-wise addition has no fixed order on GPUs, but a
    # recomputed layer must choose the same experts. The last row is padding.
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
