"""Progress on stderr, and worker processes on all cores."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, Self, TextIO

# CPU seconds after which starting worker processes pays.
_ALONE = 2.0
# Seconds from a command's start to its first status, and between two of them.
_ON_A_TERMINAL, _IN_A_FILE = (2.0, 0.2), (10.0, 10.0)
# Seconds after the command's last output, which may be the first part of a line.
_AFTER_OUTPUT = 0.5

_open: list[Any] = []  # bars, the innermost last

# Held while the thread writes: a worker forked then would find the stream's lock held for ever.
_writing = threading.Lock()
os.register_at_fork(
    before=_writing.acquire, after_in_parent=_writing.release, after_in_child=_writing.release
)


def bar[T](items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield ``items``, with a progress bar."""
    with _bar(what, total=total) as shown:
        for item in items:
            yield item
            shown.update()


@contextmanager
def search_bar() -> Iterator[None]:
    """Show a progress bar, in units of effort, for the plan searches inside the ``with`` block.

    The remaining time is an upper bound: a search ends early if it finds a plan at the lower bound.
    """
    from megatron_epp.planner.epp.progress import watched

    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with _bar("planning", total=0, bar_format=form) as shown:

        def watcher(spent: float, expected: float) -> None:
            shown.total = max(shown.total + expected, shown.n + spent)
            shown.update(spent)

        with watched(watcher):
            yield


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show ``what`` and the elapsed time while the ``with`` block runs, where it opens no bar."""
    with _bar(what, bar_format="{desc}, {elapsed}"):
        yield


@contextmanager
def _bar(what: str, **named: Any) -> Iterator[Any]:
    """Open a bar of tqdm, which status_line shows: it never shows itself."""
    from tqdm import tqdm

    shown = tqdm(desc=what, leave=False, file=sys.stderr, delay=float("inf"), **named)
    _open.append(shown)
    try:
        with shown:
            yield shown
    finally:
        _open[:] = [each for each in _open if each is not shown]  # bars are equal by position


class _Status:
    """Status on ``stream``: one line that is overwritten on a terminal, lines in a file."""

    def __init__(self, stream: TextIO):
        self._stream, self._width = stream, 0
        self._on_a_terminal = stream.isatty()
        self._output_at = -float("inf")

    def keep_showing(self, stop: threading.Event) -> None:
        """Show the innermost open bar from time to time, until ``stop`` is set."""
        first, period = _ON_A_TERMINAL if self._on_a_terminal else _IN_A_FILE
        stop.wait(first)
        while not stop.is_set():
            if _open and time.monotonic() - self._output_at > _AFTER_OUTPUT:
                self._show(str(_open[-1]))
            stop.wait(period)

    def _show(self, text: str) -> None:
        if self._on_a_terminal:
            text, self._width = f"\r{text.ljust(self._width)}", len(text)
        else:
            text += "\n"
        with _writing:
            self._stream.write(text)
            self._stream.flush()

    def erase(self) -> None:
        """Erase the line, before the command's own output."""
        self._output_at = time.monotonic()
        if self._width:
            self._show("")
            self._stream.write("\r")


class _Output:
    """Stream ``stream``, before whose output the line of ``status`` is erased."""

    def __init__(self, stream: TextIO, status: _Status):
        self._stream, self._status = stream, status

    def write(self, text: str) -> int:
        """Write ``text`` in the place of the status."""
        self._status.erase()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def status_line(command: str) -> Iterator[None]:
    """Show on stderr what the command does while the ``with`` block runs.

    A thread shows it, because a single step of a search may take minutes.
    """
    with ExitStack() as until_the_end:
        until_the_end.enter_context(doing(command))
        if not _open[-1].disable:  # by TQDM_DISABLE
            status, stop = _Status(sys.stderr), threading.Event()
            thread = threading.Thread(target=status.keep_showing, args=(stop,), daemon=True)
            outputs: Any = _Output(sys.stdout, status), _Output(sys.stderr, status)
            until_the_end.enter_context(redirect_stdout(outputs[0]))
            until_the_end.enter_context(redirect_stderr(outputs[1]))
            until_the_end.callback(status.erase)
            until_the_end.callback(thread.join)
            until_the_end.callback(stop.set)
            thread.start()
        yield


class Workers:
    """Runner of tasks, as a context manager whose exit ends all worker processes.

    Tasks run in this process at first, and in worker processes on all cores if they take long.
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
        """Return a runner with a progress bar.

        The bar shows the number of finished tasks and the label ``what``. If there is only one
        task, the bar shows the effort of its plan searches instead (:func:`search_bar`).
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
