"""Recorder of all collectives and messages over process groups."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any

from torch.distributed import ProcessGroup

MESSAGES = {"send": "send", "recv": "receive"}
COLLECTIVES = """
    _allgather_base _reduce_scatter_base allgather allgather_coalesced
    allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall alltoall_base barrier
    broadcast gather monitored_barrier reduce reduce_scatter reduce_scatter_tensor_coalesced
    scatter
"""


@dataclass(frozen=True, slots=True)
class Collective:
    """Record of a collective: operation, description of its group, and calling function."""

    operation: str
    group: str
    caller: str

    def __str__(self) -> str:
        return f"{self.operation} over {self.group or 'a group without a name'} by {self.caller}"


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """Record of a point-to-point message of ``elements`` elements over ``group``.

    ``way`` is "send" or "receive", and ``peer`` is the other rank in the group.
    """

    way: str
    group: str
    peer: int
    elements: int


class Traffic:
    """Context manager that records the collectives and messages that this process issues.

    All functions of torch.distributed, including those imported by name earlier, call a method of
    ProcessGroup. These methods are wrapped while the context is active.
    """

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self.messages: list[MessageRecord] = []
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> "Traffic":
        for name in (*COLLECTIVES.split(), *MESSAGES):
            self._originals[name] = getattr(ProcessGroup, name)
            setattr(ProcessGroup, name, self._noting(name, self._originals[name]))
        return self

    def __exit__(self, *raised: object) -> None:
        for name, original in self._originals.items():
            setattr(ProcessGroup, name, original)
        self._originals.clear()

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def noting(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if name in MESSAGES:
                (tensor,), peer = args[0], args[1]
                self.messages.append(
                    MessageRecord(MESSAGES[name], group.group_desc, peer, tensor.numel())
                )
            else:
                caller = _caller(sys._getframe(1))
                self.collectives.append(Collective(name.strip("_"), group.group_desc, caller))
            return original(group, *args, **kwargs)

        return noting


def _caller(frame: FrameType | None) -> str:
    """Return the name of the innermost calling function outside of torch and contextlib."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("torch", "contextlib") and module != __name__:
            return f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "an unknown function"
