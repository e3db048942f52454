"""Runners that map a function over tasks, in this process or in others."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol


class Runner(Protocol):
    """Callable that maps a function over the arguments of tasks, in one or several processes."""

    def __call__(self, function: Callable[..., Any], tasks: Sequence[tuple], /) -> Iterator[Any]:
        """Yield the results in the order of the tasks."""
        ...


def in_turn(function: Callable[..., Any], tasks: Sequence[tuple], /) -> Iterator[Any]:
    """Map ``function`` over the arguments of the tasks in this process."""
    return (function(*task) for task in tasks)
