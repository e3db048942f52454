"""Breaks elastic pipelines of weights held in fp8, with a scale for each tensor, another way in
every batch: those of single documents (1, 2, 4, ...) must be exact.

Run inside a rank (``Trial.interfere``), as tests/mcore/sabotage.py.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from megatron_epp.layers.attention.varlen import CuSeqlens
from tests.te_reference.sabotage import drop_returned_gradients, lose_what_was_set_aside


def _quantise(other: Callable[..., Any]) -> AbstractContextManager:
    """``other(plain, x, quantizer, weight)`` where a weight is quantised anew."""
    kernels = sys.modules["transformer_engine_torch"]
    plain = kernels.quantize

    def quantize(x, quantizer, output=None, noop=None):
        if output is None:
            return plain(x, quantizer)
        return other(plain, x, quantizer, output)

    return patch.object(kernels, "quantize", quantize)


def freeze_the_weights() -> AbstractContextManager:
    """What was quantised once is never quantised anew."""
    return _quantise(lambda plain, x, quantizer, weight: weight)


def read_stale_columns() -> AbstractContextManager:
    """What gradients of inputs are multiplied by is of the iteration before."""

    def quantize(plain, x, quantizer, weight):
        before = weight._transpose.clone()
        plain(x, quantizer, weight)._transpose.copy_(before)
        return weight

    return _quantise(quantize)


def attend_to_other_documents() -> AbstractContextManager:
    """Documents of a pack are one."""
    plain = CuSeqlens.of

    def of(queries, keys, device):
        return plain([sum(queries)], [sum(keys)], device)

    return patch.object(CuSeqlens, "of", of)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    freeze_the_weights,
    nullcontext,
    drop_returned_gradients,
    read_stale_columns,
    lose_what_was_set_aside,
    attend_to_other_documents,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number % len(WAYS)]()
