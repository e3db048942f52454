"""Faults of elastic pipelines of weights held in fp8, with a scale for each tensor.

Batches of single documents (1, 2, 4, ...) must be exact.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron_epp.layers.attention.varlen import CuSeqlens
from tests.engine.faults import engine
from tests.mcore.fault_injection import Fault, Faults, fault, in_turn, nothing


def quantised_by(other: Callable[..., Any]) -> Fault:
    """Return a fault: ``other(plain, x, quantizer, weight)`` where a weight is quantised anew."""

    def quantize(plain, x, quantizer, output=None, noop=None):
        if output is None:
            return plain(x, quantizer)
        return other(plain, x, quantizer, output)

    def inject() -> AbstractContextManager:
        return fault(sys.modules["transformer_engine_torch"], "quantize", quantize)()

    return inject


def read_stale_columns(plain, x, quantizer, weight):
    before = weight._transpose.clone()
    plain(x, quantizer, weight)._transpose.copy_(before)
    return weight


FAULTS: Faults = {
    "nothing": nothing,
    # What was quantised once is never quantised anew.
    "freeze the weights": quantised_by(lambda plain, x, quantizer, weight: weight),
    "nothing, of documents alone": nothing,
    "drop returned gradients": engine.FAULTS["drop returned gradients"],
    # What gradients of inputs are multiplied by is of the iteration before.
    "read stale columns": quantised_by(read_stale_columns),
    "lose what was set aside": engine.FAULTS["lose what was set aside"],
    # Documents of a pack are one.
    "attend to other documents": fault(
        CuSeqlens,
        "of_calls",
        lambda of_calls, calls, device: of_calls(
            [([sum(queries)], [sum(keys)]) for queries, keys in calls], device
        ),
    ),
}
around = in_turn(FAULTS)
