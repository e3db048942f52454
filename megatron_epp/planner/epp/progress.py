"""Progress of the search of a plan, by the effort that its searches spend."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Called with the ops that were spent, and the ops that one more search may spend.
Watcher = Callable[[float, float], None]

_watcher: ContextVar[Watcher | None] = ContextVar("_watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Report the searches of this process to ``watcher`` within the context."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def report_effort(spent: float = 0.0, expected: float = 0.0) -> None:
    """Report ops that a search has spent, and ops that searches may spend from now on."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(spent, expected)
