"""Faults of sinkhorn's balancing of documents."""

import torch

from megatron_epp.layers.moe import sinkhorn
from megatron_epp.mcore.kinds.moe import router
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def balance_rows_of_a_rank(balanced_weights, logits_tE, state, rules):
    rows, own = len(logits_tE), slice(rules.place, rules.place + 1)
    owners_t = sinkhorn._owners(state).reshape(rules.places, rows)[own].flatten()
    return sinkhorn.weights(logits_tE.detach().float(), owners_t, len(state.rows))


def balance_in_evaluation(router_stats, chunk_router: router.ChunkRouter):
    found, state = router_stats(chunk_router)
    rules = router.balancing_of(chunk_router.router.config)
    return found or (state and router.RouterStats(rules, (), 1)), state


FAULTS: Faults = {
    "nothing": nothing,
    # A chunk is one document, as a micro-batch is to Megatron.
    "balance the chunk": fault(
        sinkhorn,
        "weights",
        lambda weights, logits_TE, owners_T, documents: weights(
            logits_TE, torch.where(owners_T < documents, 0, 1), 1
        ),
    ),
    "nothing again": nothing,
    # Each rank balances the rows of a document that it has, as Megatron's do.
    "balance rows of a rank": fault(router, "balanced_weights", balance_rows_of_a_rank),
    # Rows of padding belong to the chunk's last document.
    "weigh padding": fault(
        sinkhorn,
        "weights",
        lambda weights, logits_TE, owners_T, documents: weights(
            logits_TE, owners_T.clamp(max=documents - 1), documents
        ),
    ),
    # Forward-only passes choose as training does.
    "balance in evaluation": fault(router.ChunkRouter, "_router_stats", balance_in_evaluation),
}
around = in_turn(FAULTS)
