"""Planner processes of one replica, each on another iteration.

How many there are changes when a plan is there, never what it says: a request is answered by one
process, from its lengths alone.
"""

import hashlib
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_epp.control.planner_process import PlannerProcess

# Plans and iterations that are remembered; and by how much planning may take longer than it did.
REMEMBERED_PLANS = 8
MARGIN = 1.25
# Memory that one process takes, compiled code and solver included.
PROCESS_BYTES = 400 << 20


def default_cores(local_ranks: int) -> int:
    """Return cores of this host for planner processes: half of those that its ranks leave idle."""
    return max(1, (len(os.sched_getaffinity(0)) - local_ranks) // 2)


@dataclass(slots=True)
class _Request:
    iteration: int
    process: PlannerProcess
    forward_only: bool


class PlannerPool:
    """At most ``most`` processes, of which ``make`` starts one.

    Another one is started when the processes there are cannot keep up with the iterations.

    discarded   plans that were asked for and not used
    """

    def __init__(self, make: Callable[[], PlannerProcess], most: int = 1):
        """Start one process."""
        self._make, self.most = make, max(1, most)
        self.processes: list[PlannerProcess] = []
        self.discarded = 0
        self._took: float | None = None
        self._requests: dict[str, _Request] = {}
        self._planning: deque[float] = deque(maxlen=REMEMBERED_PLANS)
        self._iterations: deque[float] = deque(maxlen=REMEMBERED_PLANS)
        self._since: float | None = None  # when the trainer last got a plan
        self._start()

    @property
    def ahead(self) -> int:
        """How many iterations ahead to plan, one process for each.

        As many as iterations go by while one is planned, the slowest of late.
        """
        if not (self._planning and self._iterations):
            return 1
        usual = statistics.median(self._iterations)
        wanted = MARGIN * self.slowest / max(usual, 1e-9)
        return min(self.most, max(1, math.ceil(wanted)))

    @property
    def slowest(self) -> float:
        """Seconds of the slowest plan of late."""
        return max(self._planning, default=0.0)

    def ask(self, iteration: int, lengths: Sequence[int], forward_only: bool = False) -> str:
        """Have a plan made, unless it is under way; return the request's name."""
        name = _request_name(iteration, lengths, forward_only)
        if name in self._requests:
            request = self._requests[name]
        else:
            for process in self.processes:
                process.collect()
            process = min(self.processes, key=lambda one: one.unanswered)
            if process.unanswered and not forward_only and len(self.processes) < self.ahead:
                process = self._start()
            request = self._requests[name] = _Request(iteration, process, forward_only)
        request.process.ask(name, lengths, forward_only)
        return name

    def reply(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> dict[str, Any]:
        """Return the reply for an iteration that training runs now. PlannerFailed: none comes."""
        if self._since is not None and not forward_only:
            self._iterations.append(time.monotonic() - self._since)
        name = self.ask(iteration, lengths, forward_only)
        process = self._requests[name].process
        try:
            reply = process.reply(name)
        finally:
            del self._requests[name]
            self._drop(lambda request: request.iteration <= iteration and not request.forward_only)
            self._since = None if forward_only else time.monotonic()
        if not forward_only:
            self._planning.append(reply["seconds"])
        return reply

    def took(self, seconds: float) -> None:
        """Note the last iteration's seconds, by which a process is judged to hang."""
        self._took = seconds
        for process in self.processes:
            process.iteration_seconds = seconds

    def _drop(self, stale: Callable[[_Request], bool]) -> None:
        """Discard what was asked for and is not going to be used."""
        for name in [name for name, request in self._requests.items() if stale(request)]:
            request = self._requests.pop(name)
            request.process.forget(name)
            self.discarded += 1

    def restart(self) -> None:
        """Plan otherwise from now on: what was planned ahead is discarded."""
        self._drop(lambda request: True)
        count = len(self.processes)
        self.close()
        self.processes = []
        for _ in range(count):
            self._start()

    def _start(self) -> PlannerProcess:
        process = self._make()
        process.iteration_seconds = self._took
        self.processes.append(process)
        return process

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.close()


def _request_name(iteration: int, lengths: Sequence[int], forward_only: bool) -> str:
    """Names what a plan depends on, so that a reply is never used for another batch."""
    digest = hashlib.sha256(repr(list(map(int, lengths))).encode()).hexdigest()[:16]
    return f"{'evaluation' if forward_only else 'iteration'} {iteration} {digest}"
