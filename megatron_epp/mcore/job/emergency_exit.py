"""Emergency exits of a rank: none cuts a checkpoint short, and none leaves child processes.

An emergency is a launcher that is gone, SIGTERM, or a rank that hangs. Megatron's own state says
whether a checkpoint is being written: the timers around a save, the queue of asynchronous saves,
and the handler of --exit-signal, which a save follows. Imports no torch: a rank watches its
launcher from its first line on.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

# How long an emergency exit waits for a save: at least so many seconds, or so many times the last.
LEAST_SECONDS, TIMES_THE_LAST = 60.0, 3
_LOOK_SECONDS = 0.1
_TIMERS = ("save-checkpoint", "save-checkpoint-non-persistent")


class Saves:
    """This rank's saves of checkpoints.

    last_seconds   what the last one took, as far as :meth:`look` has seen it
    first_line     what the first one is to print, on the rank that says it
    """

    def __init__(self) -> None:
        """Begin with no save seen."""
        self.last_seconds, self.first_line = 0.0, ""
        self._seen = dict.fromkeys(_TIMERS, 0.0)  # seconds of all saves, by timer

    def look(self) -> None:
        """Note what a save took that has ended since the last look."""
        for name, timer in _timers():
            seconds = timer.active_time()
            if seconds > self._seen[name]:
                self.last_seconds, self._seen[name] = seconds - self._seen[name], seconds
                line, self.first_line = self.first_line, ""
                if line:
                    print(line, flush=True)

    def under_way(self) -> bool:
        """Return whether a checkpoint is being written, or will be as a signal has asked for it."""
        handler = _of_megatron("global_vars", "_GLOBAL_SIGNAL_HANDLER")
        return (
            any(timer._started for _, timer in _timers())
            or self.pending()
            or getattr(handler, "_signal_received", False)
        )

    def pending(self) -> bool:
        """Return whether asynchronous saves wait to be finished by all ranks together."""
        queue = _of_megatron("async_utils", "_async_calls_queue")
        return queue is not None and queue.get_num_unfinalized_calls() > 0

    def ask(self) -> None:
        """Have the trainer save and end as at --exit-signal, where --exit-signal-handler is given.

        Not by the signal itself, whose handler waits for the main thread to leave a collective.
        """
        handler = _of_megatron("global_vars", "_GLOBAL_SIGNAL_HANDLER")
        if getattr(handler, "_signal_received", None) is False:
            handler._signal_received = True

    def wait(self) -> None:
        """Wait while a checkpoint is being written, within the bound."""
        self.look()
        end = time.monotonic() + max(LEAST_SECONDS, TIMES_THE_LAST * self.last_seconds)
        while self.under_way() and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)


SAVES = Saves()


def leave(status: int) -> NoReturn:
    """End this process and its children as soon as no checkpoint is being written."""
    SAVES.wait()
    end_now(status)


def end_now(status: int) -> NoReturn:
    """End this process and its children."""
    end_children()
    os._exit(status)


def end_children() -> None:
    """Kill all processes that this one has started."""
    with contextlib.suppress(ImportError):  # loops of frameworks may lack it
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _timers() -> Iterator[tuple[str, Any]]:
    """Yield the timers around saves that there are, by name."""
    timers = getattr(_of_megatron("global_vars", "_GLOBAL_TIMERS"), "_timers", {})
    return ((name, timers[name]) for name in _TIMERS if name in timers)


def _of_megatron(module: str, name: str) -> Any:
    """Return a global of Megatron's trainer; None: the trainer is not imported, or has none."""
    return getattr(sys.modules.get(f"megatron.training.{module}"), name, None)
