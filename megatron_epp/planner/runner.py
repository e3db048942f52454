"""Runners: callables that map a function over tasks, in this process or in worker processes.

A runner yields the results in the order of the tasks; a task is a tuple of arguments.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Runner = Callable[[Callable[..., Any], Sequence[tuple]], Iterator[Any]]


def in_turn(function: Callable[..., Any], tasks: Sequence[tuple]) -> Iterator[Any]:
    """Yield the results of ``function`` for the arguments of each task, in this process."""
    return (function(*task) for task in tasks)
