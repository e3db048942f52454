"""Faults of multi-latent attention."""

from contextlib import contextmanager
from unittest.mock import patch

import torch

from megatron_epp.layers import mla as latents
from megatron_epp.layers.attention.cpu import PartsAttention
from megatron_epp.layers.mla import LatentKVAttention
from megatron_epp.layers.recompute import outputs
from megatron_epp.mcore.certify.scale_down import HEAD_SIZE
from megatron_epp.mcore.kinds.mla.module import MLALayer
from megatron_epp.runtime.kv_store import Store
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def scaled(call, attention, *arguments):
    with patch.object(attention, "scale", HEAD_SIZE**-0.5):
        return call(attention, *arguments)


@contextmanager
def scale_by_kv_channels():
    kinds = PartsAttention, LatentKVAttention
    expanded, of_latents = (fault(kind, "__call__", scaled) for kind in kinds)
    with expanded(), of_latents():
        yield


def lose_the_weights_part(backward, ctx, gradient):
    made = list(backward(ctx, gradient))
    made[5] = None if made[5] is None else torch.zeros_like(made[5])
    return tuple(made)


def another_row(value, output):
    several = len(output._recompute.result()[1]) > 1
    return value(output).flip(0).contiguous() if several else value(output)


FAULTS: Faults = {
    "nothing": nothing,
    # As plain attention would: neither the rotary part of a head nor YaRN's stretch is in it.
    "scale by kv channels": scale_by_kv_channels,
    # Rotary positions from 0 in every chunk.
    "turn by the row": fault(
        MLALayer,
        "_table",
        lambda table, layer, state, positions: table(layer, state, torch.arange(len(positions))),
    ),
    # What later slices owe a latent never arrives.
    "lose gradients of latents": fault(
        Store,
        "add_gradient",
        lambda add_gradient, store, layer, document, latent, rotary: add_gradient(
            store, layer, document, torch.zeros_like(latent), rotary
        ),
    ),
    # What later slices owe a rotated key never arrives.
    "lose gradients of rotated keys": fault(
        Store,
        "add_gradient",
        lambda add_gradient, store, layer, document, latent, rotary: add_gradient(
            store, layer, document, latent, torch.zeros_like(rotary)
        ),
    ),
    # The up-projection learns nothing of the contexts that it expands.
    "lose the weight's part": fault(latents._AttendLatentKV, "backward", lose_the_weights_part),
    # The last block of a context is not attended to; backward goes through all of them.
    "forget a block": fault(latents, "_context", lambda context, *read: list(context(*read))[:-1]),
    # What the up-projection makes again in backward is another row's.
    "make it again wrongly": fault(outputs._Output, "value", another_row),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
