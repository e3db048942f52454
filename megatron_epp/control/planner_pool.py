"""Planner processes of one replica, each of which plans a different iteration.

The number of processes affects the time at which a plan is ready, but not the plan: one process
answers each request, and all processes have the same settings.
"""

import hashlib
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from megatron_epp.control.planner_process import PlannerProcess
from megatron_epp.corpus.shared_prefixes import Batch, as_sent
from megatron_epp.planner.process import Answer

# Number of recent plans and iterations whose times count; safety factor on the planning time.
REMEMBERED_PLANS = 8
MARGIN = 1.25
# Memory of one process, compiled code and solver included.
PROCESS_BYTES = 400 << 20


def default_cores(local_ranks: int) -> int:
    """Return the number of cores for planner processes: half of the cores that no rank uses."""
    return max(1, (len(os.sched_getaffinity(0)) - local_ranks) // 2)


@dataclass(slots=True)
class _Request:
    iteration: int
    process: PlannerProcess
    forward_only: bool


class PlannerPool:
    """Pool of planner processes that plan coming iterations ahead.

    The pool starts another process if the existing processes plan too slowly.

    Args:
        make: function that starts a process.
        most: maximum number of processes.

    Attributes:
        discarded: number of plans that were requested and not used.
    """

    def __init__(self, make: Callable[[], PlannerProcess], most: int = 1):
        self._make, self.most = make, max(1, most)
        self.processes: list[PlannerProcess] = []
        self.discarded = 0
        self._took: float | None = None
        self._requests: dict[str, _Request] = {}
        self._planning: deque[float] = deque(maxlen=REMEMBERED_PLANS)
        self._iterations: deque[float] = deque(maxlen=REMEMBERED_PLANS)
        self._since: float | None = None  # time at which training last received a plan
        self._start()

    @property
    def ahead(self) -> int:
        """Number of iterations to plan ahead, each in its own process.

        The number is large enough that training does not wait for a plan as slow as the slowest
        recent one. It is at most ``most``, and 1 until a plan and an iteration have been timed.
        """
        if not (self._planning and self._iterations):
            return 1
        usual = statistics.median(self._iterations)
        wanted = MARGIN * self.slowest / max(usual, 1e-9)
        return min(self.most, max(1, math.ceil(wanted)))

    @property
    def slowest(self) -> float:
        """Planning time of the slowest recent plan, in seconds."""
        return max(self._planning, default=0.0)

    def ask(self, iteration: int, lengths: Batch, forward_only: bool = False) -> str:
        """Request a plan unless the same request is pending, and return the request's name.

        If all processes are busy, another process may be started. With ``forward_only``, the plan
        is for an evaluation.
        """
        name = _request_name(iteration, lengths, forward_only)
        if name in self._requests:
            request = self._requests[name]
        else:
            process = min(self.processes, key=lambda one: one.unanswered)
            if process.unanswered and not forward_only and len(self.processes) < self.ahead:
                process = self._start()
            request = self._requests[name] = _Request(iteration, process, forward_only)
        request.process.ask(name, lengths, forward_only)
        return name

    def reply(self, iteration: int, lengths: Batch, forward_only: bool) -> Answer:
        """Wait for the plan of the iteration that training runs now, and return the answer.

        If the plan was not requested before, this method requests it. Requests for earlier
        iterations are discarded. With ``forward_only``, the plan is for an evaluation.

        Raises:
            PlannerRefused: the planner cannot plan these documents.
            PlannerFailed: the process has ended, or did not reply in time.
        """
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
            self._planning.append(reply.seconds)
        return reply

    def took(self, seconds: float) -> None:
        """Set the duration of the last iteration, from which time-outs are derived."""
        self._took = seconds
        for process in self.processes:
            process.iteration_seconds = seconds

    def _drop(self, stale: Callable[[_Request], bool]) -> None:
        """Discard the requests for which ``stale`` returns true, and their plans."""
        for name in [name for name, request in self._requests.items() if stale(request)]:
            request = self._requests.pop(name)
            request.process.forget(name)
            self.discarded += 1

    def restart(self) -> None:
        """Discard plans made ahead, and restart all processes, because their settings changed."""
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


def _request_name(iteration: int, lengths: Batch, forward_only: bool) -> str:
    """Return a name that identifies the batch, so that no reply is used for another batch."""
    digest = hashlib.sha256(repr(as_sent(lengths)).encode()).hexdigest()[:16]
    return f"{'evaluation' if forward_only else 'iteration'} {iteration} {digest}"
