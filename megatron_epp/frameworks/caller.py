"""Framework that calls Megatron's schedule, identified by its forward step."""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from megatron_epp.planner.calls.microbatch import MicrobatchShape

NEWEST = (10**6,)  # for a distribution that pip does not know, such as a checkout


def installed_release(distribution: str) -> tuple[int, ...]:
    """Return the installed release of ``distribution``, such as (0, 9, 1).

    Padding rules depend on the release. Return ``NEWEST`` if pip does not know the distribution.
    """
    try:
        numbers = re.match(r"\d+(\.\d+)*", metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return NEWEST
    return NEWEST if numbers is None else tuple(map(int, numbers[0].split(".")))


# Function from a micro-batch, as the framework's iterator yields it, to its shape; None if unknown.
Reader = Callable[[Any], MicrobatchShape | None]


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of Megatron's schedule.

    Attributes:
        forward_step: Forward step of the call.
        config: TransformerConfig of the model.
        tp, cp: Tensor- and context-parallel degrees.
    """

    forward_step: Any
    config: Any
    tp: int
    cp: int

    def brings(self, name: str) -> Any:
        """Return the first value of ``name`` in the forward step and the functions that it wraps.

        "self" means the object of a bound method; other names are closure variables. Default: None.
        """
        for function in _layers(self.forward_step):
            if name == "self" and hasattr(function, "__self__"):
                return function.__self__
            value = _closed_over(function).get(name)
            if value is not None:
                return value
        return None

    @property
    def aligned(self) -> int:
        """Multiple to which most frameworks pad the rows of a document.

        Each context-parallel rank has two parts of a document; the tensor-parallel ranks divide the
        rows of each part.
        """
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    @property
    def fp8(self) -> bool:
        """Whether the model computes in fp8."""
        return bool(getattr(self.config, "fp8", None))


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework with known micro-batches.

    Attributes:
        name: Name in messages.
        packages: Packages whose modules define the framework's forward steps.
        reader: Returns the caller's Reader, which computes micro-batch shapes (None: unknown).
        fields: Entries of a micro-batch that the Reader uses, named in messages.
    """

    name: str
    packages: tuple[str, ...]
    reader: Callable[[Caller], Reader | None]
    fields: str


def written_in(forward_step: Any) -> tuple[str, ...]:
    """Return the module names of ``forward_step`` and functions that it wraps, innermost last."""
    return tuple(
        getattr(function, "__module__", None) or type(function).__module__
        for function in _layers(forward_step)
    )


def _layers(function: Any) -> Iterator[Any]:
    """Yield ``function`` and, from outer to inner, the functions in its partials and closures."""
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
