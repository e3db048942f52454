"""Emergency exits of a rank: the rank finishes a checkpoint save, and ends all child processes.

An emergency is a dead launcher, SIGTERM, or a rank that hangs. Three variables of Megatron show
whether a rank is writing a checkpoint: the timers around a save, the queue of asynchronous saves,
and the handler of --exit-signal, which triggers a save. This module does not import torch, because
a rank watches its launcher before it imports torch.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

# An emergency exit waits for a save until both limits have passed: these seconds, and this multiple
# of the last save's duration.
LEAST_SECONDS, TIMES_THE_LAST = 60.0, 3
_LOOK_SECONDS = 0.1
_TIMERS = ("save-checkpoint", "save-checkpoint-non-persistent")


class Saves:
    """Checkpoint saves of this rank.

    Attributes:
        last_seconds: Seconds of the latest save that :meth:`look` has recorded.
        first_line: Line to print after the first save; empty on ranks that print no line.
    """

    def __init__(self) -> None:
        """Create an object without recorded saves."""
        self.last_seconds, self.first_line = 0.0, ""
        self._seen = dict.fromkeys(_TIMERS, 0.0)  # seconds of all saves, by timer

    def look(self) -> None:
        """Record the seconds of a save that has ended since the last call."""
        for name, timer in _timers():
            seconds = timer.active_time()
            if seconds > self._seen[name]:
                self.last_seconds, self._seen[name] = seconds - self._seen[name], seconds
                line, self.first_line = self.first_line, ""
                if line:
                    print(line, flush=True)

    def under_way(self) -> bool:
        """Return whether a checkpoint is being written, or a signal has requested a save."""
        handler = _of_megatron("global_vars", "_GLOBAL_SIGNAL_HANDLER")
        return (
            any(timer._started for _, timer in _timers())
            or self.pending()
            or getattr(handler, "_signal_received", False)
        )

    def pending(self) -> bool:
        """Return whether asynchronous saves exist that the ranks still have to finalise."""
        queue = _of_megatron("async_utils", "_async_calls_queue")
        return queue is not None and queue.get_num_unfinalized_calls() > 0

    def ask(self) -> None:
        """Make the trainer save and exit, if --exit-signal-handler is given.

        The method sets the handler's flag directly, because Python would run the signal handler
        only after the main thread has left a collective.
        """
        handler = _of_megatron("global_vars", "_GLOBAL_SIGNAL_HANDLER")
        if getattr(handler, "_signal_received", None) is False:
            handler._signal_received = True

    def wait(self) -> None:
        """Wait until no checkpoint is being written, or until a time limit is reached.

        The limit is 60 s, or 3 times the duration of the last save if that is longer.
        """
        self.look()
        end = time.monotonic() + max(LEAST_SECONDS, TIMES_THE_LAST * self.last_seconds)
        while self.under_way() and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)


SAVES = Saves()


def leave(status: int) -> NoReturn:
    """Wait for checkpoint saves (:meth:`Saves.wait`), and end this process and its children."""
    SAVES.wait()
    end_now(status)


def end_now(status: int) -> NoReturn:
    """End this process and its children immediately."""
    end_children()
    os._exit(status)


def end_children() -> None:
    """Kill all descendants of this process."""
    with contextlib.suppress(ImportError):  # external training loops may lack psutil
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _timers() -> Iterator[tuple[str, Any]]:
    """Yield (name, timer) of those timers around saves that Megatron has created."""
    timers = getattr(_of_megatron("global_vars", "_GLOBAL_TIMERS"), "_timers", {})
    return ((name, timers[name]) for name in _TIMERS if name in timers)


def _of_megatron(module: str, name: str) -> Any:
    """Return a global variable of Megatron's trainer; None if it is unset or not imported."""
    return getattr(sys.modules.get(f"megatron.training.{module}"), name, None)
