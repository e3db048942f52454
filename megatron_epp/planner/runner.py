"""How many plans are made: one after another, or by whatever the caller has."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol


class Runner(Protocol):
    """Calls a function with the arguments of every task, maybe in several processes."""

    def __call__(self, function: Callable[..., Any], tasks: Sequence[tuple], /) -> Iterator[Any]:
        """Yield the results in the order of the tasks."""
        ...


def in_turn(function: Callable[..., Any], tasks: Sequence[tuple], /) -> Iterator[Any]:
    """Call ``function`` with the arguments of one task after another, in this process."""
    return (function(*task) for task in tasks)
