"""Progress bars on stderr, and worker processes on all cores."""

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Self

from megatron_epp.planner.epp.progress import watched

# CPU seconds after which starting worker processes pays.
_ALONE = 2.0
# When a bar appears and is updated (seconds): on a terminal, and in a file.
_ON_A_TERMINAL = {"delay": 2.0}
_IN_A_FILE = dict.fromkeys(("delay", "mininterval", "maxinterval"), 60.0)


def bar[T](items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield ``items``, with a progress bar."""
    yield from _bar(what, iterable=items, total=total)


@contextmanager
def search_bar() -> Iterator[None]:
    """Show a progress bar, in units of effort, for the plan searches inside the ``with`` block.

    The remaining time is an upper bound: a search ends early if it finds a plan at the lower bound.
    """
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    shown = _bar("planning", total=0, bar_format=form)

    def watcher(spent: float, expected: float) -> None:
        shown.total = max(shown.total + expected, shown.n + spent)
        shown.update(spent)

    with shown, watched(watcher):
        yield


def _bar(what: str, **named: Any) -> Any:
    """Return a bar of tqdm on stderr."""
    from tqdm import tqdm

    when = _ON_A_TERMINAL if sys.stderr.isatty() else _IN_A_FILE
    return tqdm(desc=what, leave=False, file=sys.stderr, **when, **named)


class Workers:
    """Runner of tasks, in this process at first, and on all cores if the tasks take long.

    The runner is a context manager, whose exit ends all worker processes.
    """

    def __init__(self) -> None:
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._began = time.process_time()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for each in multiprocessing.active_children():
                each.terminate()

    def watched(self, what: str) -> Callable[[Callable[..., Any], Sequence[tuple]], Iterator[Any]]:
        """Return a runner with a progress bar over several tasks, or the effort of a single task.

        ``what`` is the label of the bar of several tasks.
        """

        def run(function: Callable[..., Any], tasks: Sequence[tuple], /) -> Iterator[Any]:
            if len(tasks) == 1:
                with search_bar():
                    yield from self(function, tasks)
            else:
                yield from bar(self(function, tasks), len(tasks), what)

        return run

    def __call__(self, function: Callable[..., Any], tasks: Sequence[tuple], /) -> Iterator[Any]:
        """Yield ``function(*task)`` of each task, in the order of the tasks."""
        rest = deque(tasks)
        while rest and not self._shared():
            yield function(*rest.popleft())
        if rest:
            assert self._pool is not None
            try:
                yield from self._pool.map(function, *zip(*rest, strict=True))
            except BrokenProcessPool as error:
                raise MemoryError("a process that plans was killed") from error

    def _shared(self) -> bool:
        """Start worker processes if tasks take long; return whether there are worker processes.

        Workers are forked, so that they inherit the loaded compiled code.
        """
        long = time.process_time() - self._began > _ALONE
        if self._pool is None and self._cores > 1 and long:
            fork = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(self._cores, fork, _leave_interrupts)
        return self._pool is not None


def _leave_interrupts() -> None:
    """Ignore Ctrl-C in a worker: the parent process ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
