"""Runners: callables that map a function over tasks, in this process or in worker processes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol


class Runner(Protocol):
    """Callable that calls a function once per task, in one or several processes."""

    def __call__(self, function: Callable[..., Any], tasks: Sequence[tuple], /) -> Iterator[Any]:
        """Yield the results in the order of the tasks; a task is a tuple of arguments."""
        ...


def in_turn(function: Callable[..., Any], tasks: Sequence[tuple], /) -> Iterator[Any]:
    """Yield the results of ``function`` for the arguments of each task, in this process."""
    return (function(*task) for task in tasks)
