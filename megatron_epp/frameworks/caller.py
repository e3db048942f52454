"""A framework that calls Megatron's schedule, and what its forward step brings along."""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from megatron_epp.planner.calls.microbatch import MicrobatchShape

NEWEST = (10**6,)  # of what no package of that name says its release of: a checkout


def installed_release(distribution: str) -> tuple[int, ...]:
    """Return the installed release, as (0, 9, 1): rules of padding change with it.

    ``NEWEST`` where pip knows of none.
    """
    try:
        numbers = re.match(r"\d+(\.\d+)*", metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return NEWEST
    return NEWEST if numbers is None else tuple(map(int, numbers[0].split(".")))


# The extent of a micro-batch as the framework's iterator gives it; None: it cannot be told.
Reader = Callable[[Any], MicrobatchShape | None]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls the schedule. config: the model's TransformerConfig; tp, cp: ranks."""

    forward_step: Any
    config: Any
    tp: int
    cp: int

    def brings(self, name: str) -> Any:
        """The variable ``name`` that the forward step was made with: the object whose method it is
        ("self"), or one that it closes over; None where it has none."""
        for function in _layers(self.forward_step):
            if name == "self" and hasattr(function, "__self__"):
                return function.__self__
            value = _closed_over(function).get(name)
            if value is not None:
                return value
        return None

    @property
    def aligned(self) -> int:
        """A document's rows are a multiple of this in most frameworks: each context-parallel rank
        has two parts of it, and tensor-parallel ranks share those."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    @property
    def fp8(self) -> bool:
        return bool(getattr(self.config, "fp8", None))


@dataclass(frozen=True, slots=True)
class Framework:
    """packages: where its forward steps are written. reader: of a call's micro-batches; None: it
    cannot tell how this call lays them out. fields: what that reads of a micro-batch."""

    name: str
    packages: tuple[str, ...]
    reader: Callable[[Caller], Reader | None]
    fields: str


def written_in(forward_step: Any) -> tuple[str, ...]:
    """The modules of ``forward_step`` and of what it wraps, the innermost last."""
    return tuple(
        getattr(function, "__module__", None) or type(function).__module__
        for function in _layers(forward_step)
    )


def _layers(function: Any) -> Iterator[Any]:
    """``function``, and what it wraps: a partial's, or what a wrapper closes over as a function of
    its own or of others."""
    for _ in range(8):  # a wrapper may close over itself
        yield function
        inner = function.func if isinstance(function, functools.partial) else None
        if inner is None:
            closed = _closed_over(function)
            names = ("forward_step_func", "forward_step", "func", "fn")
            inner = next((closed[name] for name in names if callable(closed.get(name))), None)
        if inner is None:
            return
        function = inner


def _closed_over(function: Any) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None)
    if code is None or not cells:
        return {}
    values = {}
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return values
