"""Breaks what ties documents to those that they continue, another way in every batch.

Run inside a rank (``Trial.interfere``): ``around(number)`` surrounds the computation of a batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

from torch import Tensor

from megatron_epp.ir import Plan
from megatron_epp.runtime.kv_store import Store


def lose_a_branch() -> AbstractContextManager:
    """Of gradients that several leave for the K and V of a prefix the first alone arrives."""
    plain = Store.add_gradient

    def add(self: Store, layer: int, document: int, key: Tensor, value: Tensor) -> None:
        if document in self.readers and self.has_gradient(layer, document):
            return
        plain(self, layer, document, key, value)

    return patch.object(Store, "add_gradient", add)


def begin_anew() -> AbstractContextManager:
    """Positions of a branch begin at 0."""
    return patch.object(Plan, "offset", lambda self, document: 0)


def see_the_nearest() -> AbstractContextManager:
    """Of documents one behind the other in front of it a branch sees the last alone."""
    plain = Plan.prefix_of
    return patch.object(Plan, "prefix_of", lambda self, document: plain(self, document)[-1:])


def mistake_values() -> AbstractContextManager:
    """Inputs of a prefix have each other's values."""
    plain = Store.context

    def context(
        self: Store, layer: int, document: int, stop: int, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        key, value = plain(self, layer, document, stop, start)
        return key, value.roll(1, 0) if document in self.readers else value

    return patch.object(Store, "context", context)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    lose_a_branch,
    begin_anew,
    see_the_nearest,
    mistake_values,
    nullcontext,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number % len(WAYS)]()
