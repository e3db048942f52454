"""Planner process of a trainer, which plans iterations ahead and is restarted if it dies.

The process runs planner/process.py. It is a subprocess with a pipe, not a worker of
multiprocessing: a trainer with a CUDA context cannot be forked, and a spawned worker would import
the trainer's main module.
"""

import atexit
import dataclasses
import logging
import os
import queue
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from megatron_epp.corpus.shared_prefixes import Batch, as_sent
from megatron_epp.cost.cost import Cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.process import Answer, PlannerSettings, Request, receive

logger = logging.getLogger(__name__)

# A planner that takes longer than this many iterations counts as hung, because waiting longer costs
# more than the plan gains. The bounds: a process needs time to start on a busy host, and the other
# ranks wait in a collective (--distributed-timeout-minutes, 10). Before the first iteration the
# upper bound applies.
PATIENCE_ITERATIONS = 20
LEAST_PATIENCE_SECONDS, MOST_PATIENCE_SECONDS = 60.0, 300.0
# Wait without a plan after which the log says what training waits for.
SILENCE_SECONDS = 30.0
# Trainers have priority where cores are scarce.
NICENESS = 5


class PlannerFailed(RuntimeError):
    """Error: the planner process returned no plan, because it died, hung, or failed."""


class PlannerRefused(PlannerFailed):
    """Error: a working planner cannot plan these documents; the message gives the reason."""


class PlannerProcess:
    """Planner process, with requests and answers over a pipe.

    :meth:`ask` does not wait; :meth:`reply` waits for one answer. A process that has died is
    started again with the next request.

    Args:
        cost: cost model to plan with.
        options: options of the planners.
        planner: name of the planner.
        replicas: data-parallel size.
        replica: first replica of the lockstep group to plan for.

    Attributes:
        iteration_seconds: duration of a recent iteration, for time-outs; None at first.
    """

    def __init__(self, cost: Cost, options: Options, planner: str, replicas: int, replica: int = 0):
        # A copy without the tables that costs cache, which would be sent, too.
        cost = dataclasses.replace(cost, layout=dataclasses.replace(cost.layout))
        self._settings = PlannerSettings(cost, options, planner, replicas, replica)
        self.iteration_seconds: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._received: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._asked: set[str] = set()
        self._unwanted: set[str] = set()
        self._answers: dict[str, Answer] = {}
        self._start()
        atexit.register(self.close)

    def ask(self, name: str, batch: Batch, forward_only: bool) -> None:
        """Send request ``name`` unless it is pending; start a new process if the old one has died.

        ``batch`` has the document lengths or, if documents share tokens, the forest of documents.
        If the process has failed, :meth:`reply` raises the error.
        """
        if name in self._asked:
            return
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._pipe is not None
        with suppress(OSError):  # reply() reports it
            self._pipe.send(Request(name, as_sent(batch), forward_only))
            self._asked.add(name)

    def reply(self, name: str) -> Answer:
        """Wait for the answer to the request ``name`` and return it.

        Raises:
            PlannerRefused: the planner cannot plan these documents.
            PlannerFailed: the process has ended, or did not answer within ``patience_seconds``.
        """
        began = time.monotonic()
        while name not in self._answers:
            if name not in self._asked:
                self._stop()
                raise PlannerFailed("the planner process has ended")
            self._take(self._next(name, began))
        answer = self._answers.pop(name)
        if answer.error:
            raise PlannerRefused(answer.error)
        return answer

    def forget(self, name: str) -> None:
        """Drop the request ``name`` or its answer, which will not be used."""
        self._answers.pop(name, None)
        if name in self._asked:
            self._unwanted.add(name)

    def _take(self, answer: Answer | None) -> None:
        """Store ``answer``, unless its request was dropped; None: the process has ended."""
        if answer is None:
            self._stop()
            raise PlannerFailed("the planner process has ended")
        self._asked.discard(answer.name)
        if answer.name in self._unwanted:
            self._unwanted.discard(answer.name)
        else:
            self._answers[answer.name] = answer

    @property
    def unanswered(self) -> int:
        """Number of requests that the process has not answered."""
        with suppress(queue.Empty, PlannerFailed):
            while self._asked:
                self._take(self._received.get_nowait())
        return len(self._asked)

    @property
    def pid(self) -> int | None:
        """Process id; None if no process runs."""
        return None if self._process is None else self._process.pid

    @property
    def patience_seconds(self) -> float:
        """Maximum time to wait for an answer, in seconds."""
        if self.iteration_seconds is None:
            return MOST_PATIENCE_SECONDS
        patience = PATIENCE_ITERATIONS * self.iteration_seconds
        return min(max(LEAST_PATIENCE_SECONDS, patience), MOST_PATIENCE_SECONDS)

    def _next(self, name: str, began: float) -> Answer | None:
        """Return the next answer. The wait for ``name`` began at ``began`` (monotonic)."""
        patience = self.patience_seconds
        silence = min(SILENCE_SECONDS, patience)
        for seconds in (silence, patience):
            with suppress(queue.Empty):
                return self._received.get(timeout=max(0.0, began + seconds - time.monotonic()))
            if seconds < patience:
                logger.warning(
                    "%s: training waits for its plan for %.0f s; after %.0f s it goes on "
                    "without the planner", name.rpartition(" ")[0], seconds, patience
                )  # fmt: skip
        self._stop()
        raise PlannerFailed(f"no plan within {patience:.0f} s")

    def _start(self) -> None:
        """Start a process and send the settings."""
        self._stop()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        package = str(Path(__file__).parents[2])
        path = [package, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        self._pipe, end = Pipe()
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_epp.planner.process", str(end.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[end.fileno()],
            )
        self._received = queue.SimpleQueue()
        self._receiver = receive(self._pipe, self._received.put)
        try:
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
        except OSError:
            logger.debug("the planner process keeps its priority", exc_info=True)
        with suppress(OSError):  # reply() reports it
            self._pipe.send(self._settings)

    def _stop(self) -> None:
        """Kill the process, if there is one, and forget its requests."""
        self._asked, self._unwanted, self._answers = set(), set(), {}
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            self._process.wait()
            self._receiver.join(1.0)  # it reads from the pipe until the end
            if not self._receiver.is_alive():
                self._pipe.close()
            self._process = self._pipe = None

    def close(self) -> None:
        """End the process."""
        self._stop()
        atexit.unregister(self.close)
