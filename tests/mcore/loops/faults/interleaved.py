"""A fault of calls of interleaved pipelines, in the third draw of batches."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from megatron_epp.mcore.loops.call_arguments import LoopCall


def read_something_else(call: LoopCall) -> list[Any]:
    """The parts after a rank's first read micro-batches whose labels are others."""
    first, *others = call.data_iterator
    rolled = ({**b, "labels": b["labels"].roll(1, 1)} for other in others for b in other)
    return [first, rolled]


def around(number: int) -> AbstractContextManager:
    if number // 2 != 2:
        return nullcontext()
    return patch.object(LoopCall, "iterators", property(read_something_else))
