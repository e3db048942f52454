"""Breaks calls of interleaved pipelines on purpose, in the third draw of batches.

Run inside a rank (``Trial.interfere``): ``around(number)`` surrounds the computation of a batch.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from megatron_epp.mcore.loops.call_arguments import LoopCall


def read_something_else() -> AbstractContextManager:
    """The parts behind a rank's first read micro-batches whose labels are others."""

    def iterators(call: LoopCall) -> list[Any]:
        first, *others = call.data_iterator
        rolled = ({**b, "labels": b["labels"].roll(1, 1)} for other in others for b in other)
        return [first, rolled]

    return patch.object(LoopCall, "iterators", property(iterators))


def around(number: int) -> AbstractContextManager:
    return read_something_else() if number == 2 else nullcontext()
