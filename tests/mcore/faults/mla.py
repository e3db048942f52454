"""Faults of multi-latent attention."""

from unittest.mock import patch

import torch

from megatron_epp.layers.attention.cpu import PartsAttention
from megatron_epp.layers.recompute import outputs
from megatron_epp.mcore.certify.scale_down import HEAD_SIZE
from megatron_epp.mcore.kinds.mla.module import MLALayer
from megatron_epp.runtime.kv_store import Store
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def scaled(call, attention, *arguments):
    with patch.object(attention, "scale", HEAD_SIZE**-0.5):
        return call(attention, *arguments)


def another_row(value, output):
    several = len(output._recompute.result()[1]) > 1
    return value(output).flip(0).contiguous() if several else value(output)


FAULTS: Faults = {
    "nothing": nothing,
    # As plain attention would: neither the rotary part of a head nor YaRN's stretch is in it.
    "scale by kv channels": fault(PartsAttention, "__call__", scaled),
    # Rotary positions from 0 in every chunk.
    "turn by the row": fault(
        MLALayer,
        "_table",
        lambda table, layer, state, positions: table(layer, state, torch.arange(len(positions))),
    ),
    # What later slices owe a key never arrives; of DSA the latent, which is its key.
    "lose gradients of keys": fault(
        Store,
        "add_gradient",
        lambda add_gradient, store, layer, document, key, value: add_gradient(
            store, layer, document, torch.zeros_like(key), value
        ),
    ),
    # What later slices owe a value never arrives; of DSA the indexer's key in its place.
    "lose gradients of values": fault(
        Store,
        "add_gradient",
        lambda add_gradient, store, layer, document, key, value: add_gradient(
            store, layer, document, key, torch.zeros_like(value)
        ),
    ),
    # What the up-projection makes again in backward is another row's.
    "make it again wrongly": fault(outputs._Output, "value", another_row),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
