"""Breaks sparse attention on purpose, another way in every batch: what a certificate must notice.

Run inside a rank (``Trial.interfere``), as sabotage.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from megatron_epp.layers import dsa
from megatron_epp.mcore.kinds.dsa import module
from megatron_epp.mcore.kinds.dsa.module import DSALayer
from tests.mcore.sabotage_latents import (
    lose_gradients_of_latents,
    lose_gradients_of_rotated_keys,
)

# The store has the indexer's key in the place of a latent's rotated one.
lose_gradients_of_the_indexer = lose_gradients_of_rotated_keys


@dataclass(frozen=True, slots=True)
class OwnKeys(dsa._Block):
    """A block that sees nothing in front of its slice."""

    context: int

    def there(self, device: torch.device) -> torch.Tensor:
        own = torch.arange(self.stop, device=device) >= self.context
        return dsa._Block.there(self, device) & own


def choose_among_own_keys() -> AbstractContextManager:
    """The best keys of a slice, and not of its document."""
    plain = dsa._blocks

    def blocks(rows, seen, *others):
        context = len(seen[0]) - (rows.stop - rows.start)
        for block in plain(rows, seen, *others):
            yield OwnKeys(block.rows, block.first, context)

    return patch.object(dsa, "_blocks", blocks)


def choose_another_document_s_keys() -> AbstractContextManager:
    """The row in front of a document in its chunk is one of its keys, another's."""
    plain = dsa._seen

    def seen(rows, keys, ctx):
        found = plain(rows, keys, ctx)
        if not rows.start:
            return found
        others = (key[rows.start - 1] for key in keys)
        return tuple(torch.cat(part) for part in zip(others, found, strict=True))

    return patch.object(dsa, "_seen", seen)


def scale_the_loss_by_the_chunk() -> AbstractContextManager:
    """A mean over the rows of a chunk, and not a sum."""
    plain = module.attend_chosen

    def attend(q, key, index, state, layer, how, *others):
        of_mean = replace(how, weight=how.weight / state.used)
        return plain(q, key, index, state, layer, of_mean, *others)

    return patch.object(module, "attend_chosen", attend)


def turn_by_the_row() -> AbstractContextManager:
    """The indexer's positions count from 0 in every chunk."""
    plain = DSALayer._index

    def index(self, x, queries, params):
        places = torch.arange(len(params.positions), device=params.positions.device)
        return plain(self, x, queries, replace(params, positions=places))

    return patch.object(DSALayer, "_index", index)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    lose_gradients_of_the_indexer,
    lose_gradients_of_latents,
    choose_among_own_keys,
    choose_another_document_s_keys,
    scale_the_loss_by_the_chunk,
    turn_by_the_row,
    nullcontext,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number]()
