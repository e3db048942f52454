"""Readers of the shapes of micro-batches, by the rules of the framework that calls the schedule.

The readers in megatron_epp.frameworks implement the micro-batch layout of each framework, which may
change with the framework's version. Therefore Megatron's own schedule runs the first calls, and the
shapes of the outputs are compared with the shapes that were read. If they differ in the first calls
or in a later call (redone_call.py), Megatron's schedule runs all calls from then on.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_epp.frameworks.caller import Caller
from megatron_epp.frameworks.known import framework_of
from megatron_epp.mcore.loops.call_arguments import LoopCall
from megatron_epp.mcore.loops.microbatch_shapes import shape_of
from megatron_epp.planner.calls.microbatch import MicrobatchShape


@dataclass(frozen=True, slots=True)
class FrameworkReader:
    """Reader of the shapes of a framework's micro-batches.

    Attributes:
        framework: Name of the framework, used in messages.
        fields: Names of the entries that are read, used in messages.
        reader: Function that returns the shape of a micro-batch. If it raises, the shape is
            unknown.
    """

    framework: str
    fields: str
    reader: Callable[[Any], MicrobatchShape | None]

    def __call__(self, micro_batch: Any) -> MicrobatchShape | None:
        """Return the shape of ``micro_batch``; None if it is unknown."""
        try:
            return self.reader(micro_batch)
        except Exception:  # another version with another layout
            return None

    def unlike(self, number: int, read: tuple[int, ...], came: tuple[int, ...] | None) -> str:
        """Return the log message that micro-batch ``number`` has shape ``came``, not ``read``."""
        return (
            f"micro-batches that {self.framework} lays out otherwise: micro-batch {number} was "
            f"read as {read} ({self.reader.__module__}, by {self.fields}) and came as {came}"
        )


# For unknown loops with micro-batches that are mappings of a common form.
COMMON_FORM = FrameworkReader("this loop", "tokens or input_ids", shape_of)


def reader_of(call: LoopCall, groups: Any) -> FrameworkReader | None:
    """Return the reader of the framework that defines the forward step of ``call``.

    Return None if the framework is unknown or has no reader for this call.
    """
    framework = framework_of(call.forward_step_func)
    if framework is None:
        return None
    try:
        caller = Caller(call.forward_step_func, call.config, groups.tp.size(), groups.cp.size())
        reader = framework.reader(caller)
    except Exception:
        return None
    if reader is None:
        return None
    return FrameworkReader(framework.name, framework.fields, reader)


@dataclass
class ShapeWitness:
    """Wrapper of ``forward_step`` that records the shape of each output in ``seen``."""

    forward_step: Callable[..., Any]
    seen: list[tuple[int, ...] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.forward_step, updated=())

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the forward step and record the shape of its output."""
        result = self.forward_step(*arguments, **keywords)
        output = result[0] if isinstance(result, tuple) else result
        self.seen.append(tuple(output.shape) if isinstance(output, torch.Tensor) else None)
        return result

    def unlike(self, expected: list[tuple[int, ...]], reader: FrameworkReader) -> str | None:
        """Return a message on the first recorded shape unlike ``expected``; None if all agree."""
        for number, predicted in enumerate(expected):
            came = self.seen[number] if number < len(self.seen) else None
            if predicted != came:
                return reader.unlike(number, predicted, came)
        return None
