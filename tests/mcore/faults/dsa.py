"""Faults of DeepSeek sparse attention."""

from dataclasses import dataclass, replace

import torch

from megatron_epp.layers import dsa as sparse
from megatron_epp.mcore.kinds.dsa import module as sparse_attention
from megatron_epp.mcore.kinds.dsa.module import DSALayer
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing
from tests.mcore.faults import mla


@dataclass(frozen=True, slots=True)
class OwnKeys(sparse._Block):
    """A block that sees nothing before its slice."""

    context: int

    def there(self, device: torch.device) -> torch.Tensor:
        own = torch.arange(self.stop, device=device) >= self.context
        return sparse._Block.there(self, device) & own


def choose_among_own_keys(blocks, rows, seen, *others):
    context = len(seen[0]) - (rows.stop - rows.start)
    for block in blocks(rows, seen, *others):
        yield OwnKeys(block.rows, block.first, context)


def choose_another_documents_keys(seen, rows, keys, ctx):
    found = seen(rows, keys, ctx)
    if not rows.start:
        return found
    others = (key[rows.start - 1] for key in keys)
    return tuple(torch.cat(part) for part in zip(others, found, strict=True))


def scale_the_loss_by_the_chunk(attend_chosen, q, key, index, state, layer, how, *others):
    of_mean = replace(how, weight=how.weight / state.used)
    return attend_chosen(q, key, index, state, layer, of_mean, *others)


def turn_by_the_row(index, layer: DSALayer, x, queries, params):
    places = torch.arange(len(params.positions), device=params.positions.device)
    return index(layer, x, queries, replace(params, positions=places))


FAULTS: Faults = {
    "nothing": nothing,
    # The store has the latent in the place of a key, and the indexer's key in that of a value.
    "lose gradients of the indexer": mla.FAULTS["lose gradients of values"],
    "lose gradients of latents": mla.FAULTS["lose gradients of keys"],
    # The best keys of a slice, and not of its document.
    "choose among own keys": fault(sparse, "_blocks", choose_among_own_keys),
    # The row before a document in its chunk is one of its keys, another's.
    "choose another document's keys": fault(sparse, "_seen", choose_another_documents_keys),
    # A mean over the rows of a chunk, and not a sum.
    "scale the loss by the chunk": fault(
        sparse_attention, "attend_chosen", scale_the_loss_by_the_chunk
    ),
    # The indexer's positions count from 0 in every chunk.
    "turn by the row": fault(DSALayer, "_index", turn_by_the_row),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
