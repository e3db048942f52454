"""Faults of a HybridModel's chunks."""

import torch

from megatron_epp.mcore.kinds.positions import PositionedRotary
from megatron_epp.mcore.model.hybrid_stack import LocalHybridStack
from megatron_epp.runtime.kv_store import Store
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def forget_the_last_norm(forward, stack: LocalHybridStack, *args, **others):
    stack.post_layer_norm = False
    try:
        return forward(stack, *args, **others)
    finally:
        stack.post_layer_norm = True


def attend_to_another_layers(context, store: Store, layer, document: int, stop: int, start=0):
    first = min(kept for kept, owner in store._kept if owner == document)
    return context(store, first, document, stop, start)


def turn_by_the_row(get_rotary_seq_len, rotary: PositionedRotary, *args):
    length = get_rotary_seq_len(rotary, *args)
    rotary._positions = torch.arange(len(rotary._positions))
    return length


FAULTS: Faults = {
    "nothing": nothing,
    # The early head gets what the last layer gives.
    "forget the last norm": fault(LocalHybridStack, "forward", forget_the_last_norm),
    # K and V of a context are those of the stage's first attention layer.
    "attend to another layers": fault(Store, "context", attend_to_another_layers),
    # Positions are those of rows in the chunk.
    "turn by the row": fault(PositionedRotary, "get_rotary_seq_len", turn_by_the_row),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
