"""Breaks sinkhorn's balancing of documents on purpose, another way in every batch.

Run inside a rank (``Trial.interfere``), as sabotage.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch

from megatron_epp.layers.moe import sinkhorn
from megatron_epp.mcore.kinds.moe import router


def balance_the_chunk() -> AbstractContextManager:
    """A chunk is one document, as a micro-batch is to Megatron."""
    plain = sinkhorn.weights

    def weights(logits_TE, owners_T, documents):
        together = torch.where(owners_T < documents, 0, 1)
        return plain(logits_TE, together, 1)

    return patch.object(sinkhorn, "weights", weights)


def balance_rows_of_a_rank() -> AbstractContextManager:
    """Each rank balances the rows of a document that it has, as Megatron's do."""
    plain = sinkhorn.balanced_weights

    def balanced(logits_tE, state, rules):
        rows, own = len(logits_tE), slice(rules.place, rules.place + 1)
        owners_t = sinkhorn._owners(state).reshape(rules.places, rows)[own].flatten()
        return sinkhorn.weights(logits_tE.detach().float(), owners_t, len(state.rows))

    assert plain is router.balanced_weights
    return patch.object(router, "balanced_weights", balanced)


def weigh_padding() -> AbstractContextManager:
    """Rows of padding belong to the chunk's last document."""
    plain = sinkhorn.weights

    def weights(logits_TE, owners_T, documents):
        return plain(logits_TE, owners_T.clamp(max=documents - 1), documents)

    return patch.object(sinkhorn, "weights", weights)


def balance_in_evaluation() -> AbstractContextManager:
    """Forwards alone choose as training does."""
    plain = router.ChunkRouter._router_stats

    def router_stats(self):
        found, state = plain(self)
        rules = router.balancing_of(self.router.config)
        return found or (state and router.RouterStats(rules, (), 1)), state

    return patch.object(router.ChunkRouter, "_router_stats", router_stats)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    balance_the_chunk,
    nullcontext,
    balance_rows_of_a_rank,
    weigh_padding,
    balance_in_evaluation,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number]()
