"""Emergency exits of a rank: none truncates a checkpoint, and none leaves child processes.

An emergency is a dead launcher, SIGTERM, or a rank that hangs. Megatron's own state shows whether a
checkpoint is being written: the timers around a save, the queue of asynchronous saves, and the
handler of --exit-signal, which triggers a save. This module imports no torch, because a rank
watches its launcher from its first line on.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

# An emergency exit waits for a save at most this long, or this multiple of the last save's duration
# if that is longer.
LEAST_SECONDS, TIMES_THE_LAST = 60.0, 3
_LOOK_SECONDS = 0.1
_TIMERS = ("save-checkpoint", "save-checkpoint-non-persistent")


class Saves:
    """Checkpoint saves of this rank.

    Attributes:
        last_seconds: Duration of the latest save that :meth:`look` has seen.
        first_line: Line to print after the first save; empty on ranks that print nothing.
    """

    def __init__(self) -> None:
        """Start without any save seen."""
        self.last_seconds, self.first_line = 0.0, ""
        self._seen = dict.fromkeys(_TIMERS, 0.0)  # seconds of all saves, by timer

    def look(self) -> None:
        """Record the duration of a save that ended since the last call."""
        for name, timer in _timers():
            seconds = timer.active_time()
            if seconds > self._seen[name]:
                self.last_seconds, self._seen[name] = seconds - self._seen[name], seconds
                line, self.first_line = self.first_line, ""
                if line:
                    print(line, flush=True)

    def under_way(self) -> bool:
        """Return whether a checkpoint is being written, or will be because of a signal."""
        handler = _of_megatron("global_vars", "_GLOBAL_SIGNAL_HANDLER")
        return (
            any(timer._started for _, timer in _timers())
            or self.pending()
            or getattr(handler, "_signal_received", False)
        )

    def pending(self) -> bool:
        """Return whether asynchronous saves wait for all ranks to finalise them."""
        queue = _of_megatron("async_utils", "_async_calls_queue")
        return queue is not None and queue.get_num_unfinalized_calls() > 0

    def ask(self) -> None:
        """Make the trainer save and exit as --exit-signal does, if --exit-signal-handler is given.

        The flag is set directly, because the signal's handler runs only when the main thread leaves
        a collective.
        """
        handler = _of_megatron("global_vars", "_GLOBAL_SIGNAL_HANDLER")
        if getattr(handler, "_signal_received", None) is False:
            handler._signal_received = True

    def wait(self) -> None:
        """Wait until no checkpoint is being written, within the limit of the constants above."""
        self.look()
        end = time.monotonic() + max(LEAST_SECONDS, TIMES_THE_LAST * self.last_seconds)
        while self.under_way() and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)


SAVES = Saves()


def leave(status: int) -> NoReturn:
    """End this process and its children once no checkpoint is being written."""
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
    """Yield the existing timers around saves, by name."""
    timers = getattr(_of_megatron("global_vars", "_GLOBAL_TIMERS"), "_timers", {})
    return ((name, timers[name]) for name in _TIMERS if name in timers)


def _of_megatron(module: str, name: str) -> Any:
    """Return a global of Megatron's trainer; None if the trainer is not imported or has none."""
    return getattr(sys.modules.get(f"megatron.training.{module}"), name, None)
