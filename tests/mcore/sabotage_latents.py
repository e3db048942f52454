"""Breaks latent attention on purpose, another way in every batch: what a certificate must notice.

Run inside a rank (``Trial.interfere``), as sabotage.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from unittest.mock import patch

import torch

from megatron_epp.layers import mla
from megatron_epp.layers.attention.cpu import PartsAttention
from megatron_epp.layers.mla import LatentsAttention
from megatron_epp.layers.recompute import outputs
from megatron_epp.mcore.certify.scale_down import HEAD_SIZE
from megatron_epp.mcore.kinds.mla.module import MLALayer
from megatron_epp.runtime.kv_store import Store


def scale_by_kv_channels() -> AbstractContextManager:
    """As plain attention would: neither the rotary part of a head nor YaRN's stretch is in it."""
    broken = ExitStack()
    for kind in (PartsAttention, LatentsAttention):
        broken.enter_context(patch.object(kind, "__call__", scaled(kind.__call__)))
    return broken


def scaled(plain: Callable) -> Callable:
    def call(self, *arguments):
        with patch.object(self, "scale", HEAD_SIZE**-0.5):
            return plain(self, *arguments)

    return call


def turn_by_the_row() -> AbstractContextManager:
    """Rotary positions from 0 in every chunk."""
    plain = MLALayer._table
    return patch.object(
        MLALayer,
        "_table",
        lambda self, state, positions: plain(self, state, torch.arange(len(positions))),
    )


def lose_gradients_of_latents() -> AbstractContextManager:
    """What later slices owe a latent never arrives."""
    plain = Store.add_gradient
    return patch.object(
        Store,
        "add_gradient",
        lambda self, layer, document, latent, rotary: plain(
            self, layer, document, torch.zeros_like(latent), rotary
        ),
    )


def lose_gradients_of_rotated_keys() -> AbstractContextManager:
    """What later slices owe a rotated key never arrives."""
    plain = Store.add_gradient
    return patch.object(
        Store,
        "add_gradient",
        lambda self, layer, document, latent, rotary: plain(
            self, layer, document, latent, torch.zeros_like(rotary)
        ),
    )


def lose_the_weight_s_share() -> AbstractContextManager:
    """The up-projection learns nothing of the contexts that it expands."""
    plain = mla._AttendLatents.backward

    def backward(ctx, gradient):
        made = list(plain(ctx, gradient))
        made[5] = None if made[5] is None else torch.zeros_like(made[5])
        return tuple(made)

    return patch.object(mla._AttendLatents, "backward", staticmethod(backward))


def forget_a_block() -> AbstractContextManager:
    """The last block of a context is not attended to; backward goes through all of them."""
    plain = mla._context
    return patch.object(mla, "_context", lambda *read: list(plain(*read))[:-1])


def make_it_again_wrongly() -> AbstractContextManager:
    """What the up-projection makes again in backward is another row's."""
    plain = outputs._Output.value

    def value(self):
        several = len(self._recompute.result()[1]) > 1
        return plain(self).flip(0).contiguous() if several else plain(self)

    return patch.object(outputs._Output, "value", value)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    scale_by_kv_channels,
    turn_by_the_row,
    lose_gradients_of_latents,
    lose_gradients_of_rotated_keys,
    lose_the_weight_s_share,
    forget_a_block,
    make_it_again_wrongly,
    nullcontext,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number]()
