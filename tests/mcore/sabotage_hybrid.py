"""Breaks a HybridModel's chunks on purpose, another way in every batch: what a certificate must
notice.

Run inside a rank (``Trial.interfere``), as sabotage.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch

from megatron_epp.mcore.kinds.positions import PositionedRotary
from megatron_epp.mcore.model.hybrid_stack import LocalHybridStack
from megatron_epp.runtime.kv_store import Store


def forget_the_last_norm() -> AbstractContextManager:
    """The early head gets what the last layer gives."""
    plain = LocalHybridStack.forward

    def forward(self: LocalHybridStack, *args, **others):
        self.post_layer_norm = False
        try:
            return plain(self, *args, **others)
        finally:
            self.post_layer_norm = True

    return patch.object(LocalHybridStack, "forward", forward)


def attend_to_another_layers() -> AbstractContextManager:
    """K and V of a context are those of the stage's first attention layer."""
    plain = Store.context

    def context(self: Store, layer: int, document: int, stop: int, start: int = 0):
        first = min(kept for kept, owner in self._kept if owner == document)
        return plain(self, first, document, stop, start)

    return patch.object(Store, "context", context)


def turn_by_the_row() -> AbstractContextManager:
    """Positions are those of rows in the chunk."""
    plain = PositionedRotary.get_rotary_seq_len

    def get_rotary_seq_len(self: PositionedRotary, *args):
        length = plain(self, *args)
        self._positions = torch.arange(len(self._positions))
        return length

    return patch.object(PositionedRotary, "get_rotary_seq_len", get_rotary_seq_len)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    forget_the_last_norm,
    attend_to_another_layers,
    turn_by_the_row,
    nullcontext,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number]()
