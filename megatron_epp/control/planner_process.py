"""Planner process of a trainer, which plans iterations ahead and is restarted if it dies.

It is a subprocess that reads and writes lines of JSON, not a worker of multiprocessing. A trainer
with a CUDA context cannot be forked, and a spawned worker would import the trainer's main module. A
subprocess with a command line can also be run and inspected by hand.
"""

import atexit
import json
import logging
import math
import os
import select
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import format_kinds

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


def end_with_reader(replies: int) -> None:
    """Block until the pipe ``replies`` has no reader, and end this process.

    Call it in a thread, so that a planner process ends after its trainer was killed, even while it
    plans. If ``replies`` is a terminal or a file, the call blocks forever.
    """
    broken = select.poll()
    broken.register(replies, 0)  # errors are always reported
    broken.poll()
    os._exit(0)


class PlannerFailed(RuntimeError):
    """Error: the planner process returned no plan, because it died, hung, or failed."""


class PlannerRefused(PlannerFailed):
    """Error: a working planner cannot plan these documents; the message gives the reason."""


class PlannerProcess:
    """Process ``python -m megatron_epp serve``, with requests and replies over pipes.

    :meth:`ask` does not wait; :meth:`reply` waits for one reply. A process that has died is started
    again with the next request.

    Args:
        cost: cost model to plan with.
        options: options of the planners.
        planner: name of the planner.
        replicas: data-parallel size.
        replica: first replica of the lockstep group to plan for; None plans full steps.

    Attributes:
        iteration_seconds: duration of a recent iteration, for time-outs; None at first.
    """

    def __init__(
        self,
        cost: Cost,
        options: Any,
        planner: str,
        replicas: int,
        replica: int | None = None,
    ):
        self.planner, self.replicas, self.replica = planner, replicas, replica
        self.iteration_seconds: float | None = None
        # An unnamed file, so that nothing remains however this job ends.
        self._profile = tempfile.TemporaryFile("w+", encoding="utf-8", prefix="megatron_epp-")  # noqa: SIM115
        layout = cost.layout
        self._profile.write(layout.profile.to_json())
        self._profile.flush()
        budgets = [repr(budget / GIB) for budget in cost.device_budget_bytes]
        # The command refuses this lever where it has no effect.
        idle = {"local"} if layout.cp == 1 or options.lockstep > 1 else set[str]()
        self._command = [
            *(sys.executable, "-m", "megatron_epp", "serve"),
            *("--cost-model", f"/dev/fd/{self._profile.fileno()}", "--zero", str(layout.zero)),
            *("--pp", str(layout.placement.ranks), "--layers", *map(str, layout.layers)),
            *(("--placement", "place", *map(str, layout.place)) if layout.place else ()),
            *("--tp", str(layout.tp), "--cp", str(layout.cp), "--dp", str(layout.dp)),
            *(("--layer-kinds", format_kinds(layout.layer_kinds)) if layout.layer_kinds else ()),
            *("--ep", str(layout.ep)),
            *(("--vocab-parallel", "on") if layout.vocabulary_parallel else ()),
            *("--memory-budget-gib", *budgets, "--context", str(options.context)),
            *("--levers", ",".join(sorted(options.levers - idle)) or "none"),
            *(("--effort", str(options.effort)) if options.effort is not None else ()),
            *("--multiple", str(cost.multiple)),
            *(("--lockstep", str(options.lockstep)) if options.lockstep > 1 else ()),
        ]
        if math.isfinite(cost.host_budget_bytes):
            self._command += ["--host-memory-gib", repr(cost.host_budget_bytes / GIB)]
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: set[str] = set()
        self._unwanted: set[str] = set()
        self._replies: dict[str, dict[str, Any]] = {}
        self._read = b""
        self._readable = selectors.DefaultSelector()
        self._process = self._start()
        atexit.register(self.close)

    def ask(self, name: str, lengths: Sequence[int], forward_only: bool) -> None:
        """Send a request unless a request ``name`` is pending; start a new process if it has died.

        This method does not raise the failure of a process; :meth:`reply` does.
        """
        if name in self._asked:
            return
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        request = {
            "id": name,
            "lengths": list(map(int, lengths)),
            "replicas": self.replicas,
            "replica": self.replica,
            "planner": self.planner,
            "forward_only": forward_only,
        }
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, OSError):
            return  # reply() reports it
        self._asked.add(name)

    def reply(self, name: str) -> dict[str, Any]:
        """Wait for the reply to the request ``name`` and return it.

        Raises:
            PlannerRefused: the planner cannot plan these documents.
            PlannerFailed: the process has ended, or did not reply within ``patience_seconds``.
        """
        began = time.monotonic()
        while name not in self._replies:
            if name not in self._asked:
                self._stop()
                raise PlannerFailed("the planner process has ended")
            self._take(self._line(name, began))
        reply = self._replies.pop(name)
        if reply["error"] is not None:
            raise PlannerRefused(reply["error"])
        return reply

    def forget(self, name: str) -> None:
        """Drop the request ``name`` or its reply, which will not be used."""
        self._replies.pop(name, None)
        if name in self._asked:
            self._unwanted.add(name)

    def collect(self) -> None:
        """Read the replies that have arrived, because a full pipe would block the process."""
        while self._process is not None and self._readable.select(0):
            assert self._process.stdout is not None
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                return  # the process has ended, which reply() reports
            self._read += data
            while b"\n" in self._read:
                line, _, self._read = self._read.partition(b"\n")
                self._take(line)

    def _take(self, line: bytes) -> None:
        """Store the reply in ``line``, unless its request was dropped."""
        reply = json.loads(line)
        name = reply["id"]
        self._asked.discard(name)
        if name in self._unwanted:
            self._unwanted.discard(name)
        else:
            self._replies[name] = reply

    @property
    def unanswered(self) -> int:
        """Number of requests that the process has not answered."""
        return len(self._asked)

    @property
    def pid(self) -> int | None:
        """Process id; None if no process runs."""
        return None if self._process is None else self._process.pid

    @property
    def patience_seconds(self) -> float:
        """Maximum time to wait for a reply, in seconds."""
        if self.iteration_seconds is None:
            return MOST_PATIENCE_SECONDS
        patience = PATIENCE_ITERATIONS * self.iteration_seconds
        return min(max(LEAST_PATIENCE_SECONDS, patience), MOST_PATIENCE_SECONDS)

    def _line(self, name: str, began: float) -> bytes:
        """Return the process's next line. The wait for ``name`` began at ``began`` (monotonic)."""
        patience = self.patience_seconds
        report_at = began + min(SILENCE_SECONDS, patience)
        while b"\n" not in self._read:
            now = time.monotonic()
            if not self._readable.select(max(0.0, min(report_at, began + patience) - now)):
                if time.monotonic() < began + patience:
                    logger.warning(
                        "%s: training waits for its plan for %.0f s; after %.0f s it goes on "
                        "without the planner", name.rpartition(" ")[0], report_at - began, patience
                    )  # fmt: skip
                    report_at = began + patience
                    continue
                self._stop()
                raise PlannerFailed(f"no plan within {patience:.0f} s")
            assert self._process is not None and self._process.stdout is not None
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                self._stop()
                raise PlannerFailed("the planner process has ended")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _start(self) -> subprocess.Popen[bytes]:
        self._stop()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        package = str(Path(__file__).parents[2])
        path = [package, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        self._profile.seek(0)  # if /dev/fd shares the file offset, the process reads from here
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            pass_fds=[self._profile.fileno()],
        )
        assert process.stdout is not None
        self._read = b""
        self._readable = selectors.DefaultSelector()
        self._readable.register(process.stdout, selectors.EVENT_READ)
        try:
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        except OSError:
            logger.debug("the planner process keeps its priority", exc_info=True)
        return process

    def _stop(self) -> None:
        """Kill the process, if there is one, and forget its requests."""
        self._asked, self._unwanted, self._replies = set(), set(), {}
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._readable.close()
            self._process = None

    def close(self) -> None:
        """End the process and delete its temporary cost model file."""
        self._stop()
        self._profile.close()
        atexit.unregister(self.close)
