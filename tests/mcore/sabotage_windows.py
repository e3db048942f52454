"""Breaks windows and sinks on purpose, another way in every batch: what a certificate must notice.

Run inside a rank (``Trial.interfere``), as sabotage.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch

from megatron_epp.layers import window
from megatron_epp.layers.attention import cpu
from megatron_epp.layers.attention.tails import Tails
from megatron_epp.runtime.kv_store import Store


def see_one_less() -> AbstractContextManager:
    """W keys and not W + 1: the window counts the query's own."""
    plain = window._mask
    return patch.object(
        window,
        "_mask",
        lambda queries, keys, before, dtype: plain(queries, keys, before - 1, dtype),
    )


def see_only_the_slice_before() -> AbstractContextManager:
    """What lies behind two borders is forgotten, where the slice between is shorter than W."""
    plain = Tails.seen

    def seen(self: Tails, start: int, most: int | None = None):
        first, end = plain(self, start, most)
        if self.borders is None:
            return first, end
        index = self.borders.index(start)
        before = self.borders[index - 1] if index else 0
        return max(first, end - (start - before)), end

    return patch.object(Tails, "seen", seen)


def drop_gradients_of_tails() -> AbstractContextManager:
    """What later slices leave for a tail never arrives."""

    def nothing(self: Store, layer, document, start, key_grad, value_grad):
        kept = self._kept[layer, document]
        if kept.key_grad_CGD is None:
            kept.key_grad_CGD = torch.zeros_like(kept.key_CGD)
            kept.value_grad_CGD = torch.zeros_like(kept.value_CGD)
            self._grew(2 * kept.key_grad_CGD.nbytes)

    return patch.object(Store, "add_window_gradient", nothing)


def forget_the_sinks() -> AbstractContextManager:
    """Softmax over the keys alone."""
    plain = cpu.PartsAttention.of_layer
    return patch.object(
        cpu.PartsAttention,
        "__call__",
        lambda self, *arguments: _CALL(plain(self, self.before, lambda: None), *arguments),
    )


_CALL = cpu.PartsAttention.__call__

WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    see_one_less,
    see_only_the_slice_before,
    drop_gradients_of_tails,
    forget_the_sinks,
    nullcontext,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number]()
