"""Progress of planning, measured by the effort that the planner's searches spend."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Called with (ops just spent, additional ops that searches may spend from now on).
Watcher = Callable[[float, float], None]

_watcher: ContextVar[Watcher | None] = ContextVar("_watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Report the progress of searches to ``watcher`` within this context."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def report_effort(spent: float = 0.0, expected: float = 0.0) -> None:
    """Report the ops that a search just spent, and additional ops that may be spent later."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(spent, expected)
