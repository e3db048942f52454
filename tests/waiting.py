"""Waiting in tests: for something to be there, and never by the clock.

No assertion compares elapsed time and no sleep stands for "by now it has happened": a busy machine
breaks both. A test waits for the event itself. ``LAST_RESORT_SECONDS`` only ends a test that hangs:
twenty times the longest quiet run, so that no load reaches it. ``tests/test_no_clocks.py`` looks
for comparisons with a clock elsewhere.
"""

import time
from collections.abc import Callable

LAST_RESORT_SECONDS = 1800.0


def until(there: Callable[[], object], what: Callable[[], object] = lambda: "") -> None:
    """Return when ``there`` is true. AssertionError: it never is; ``what`` says what was seen."""
    end = time.monotonic() + LAST_RESORT_SECONDS
    while not there():
        assert time.monotonic() < end, f"hangs: {what()}"
        time.sleep(0.05)
