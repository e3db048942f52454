"""A planner process, seen from the trainer: asked iterations ahead, replaced when it dies.

A subprocess that reads and writes lines of JSON, and no pool of forked or spawned workers: a
trainer that has a CUDA context cannot be forked, a spawned worker would import the trainer's main
module, and a process with a command line of its own can be run, fed and watched by hand.
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

# A reply that takes longer counts as a planner that hangs: so many iterations' time, as a plan that
# takes longer is worth less than the iterations it would hold up. Never less than a process needs
# to start on a busy host, nor more than what the other ranks, who wait in a collective meanwhile,
# have patience for (--distributed-timeout-minutes, 10). Before the first iteration nobody knows.
PATIENCE_ITERATIONS = 20
LEAST_PATIENCE_SECONDS, MOST_PATIENCE_SECONDS = 60.0, 300.0
# After this long without a plan the log says what training waits for.
SILENCE_SECONDS = 30.0
# Trainers come first where cores are few.
NICENESS = 5


def end_with_reader(replies: int) -> None:
    """End this process as soon as nobody reads its replies any more, in the midst of a plan too.

    A trainer that was killed leaves no other sign. A terminal or a file never says so.
    """
    broken = select.poll()
    broken.register(replies, 0)  # errors are always told
    broken.poll()
    os._exit(0)


class PlannerFailed(RuntimeError):
    """No plan came: the process died, hung, or answered with an error."""


class PlannerRefused(PlannerFailed):
    """The planner lives and says why these documents cannot be planned."""


class PlannerProcess:
    """``python -m megatron_epp serve`` over pipes: requests out, replies in, in one order.

    Requests do not wait; :meth:`reply` waits for one. A process that died is started anew with
    the next request.

    replica             whose plans it makes, and of those in lockstep with it; None: whole steps
    iteration_seconds   what an iteration took of late, where one has run
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
        # Has no name in any folder, so however this job ends nothing is left of it.
        self._profile = tempfile.TemporaryFile("w+", encoding="utf-8", prefix="megatron_epp-")  # noqa: SIM115
        layout = cost.layout
        self._profile.write(layout.profile.to_json())
        self._profile.flush()
        budgets = [repr(budget / GIB) for budget in cost.device_budget_bytes]
        # Named where it could do nothing, this lever is refused.
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
            *(("--whole",) if options.whole else ()),
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
        """Send a request unless one of that name is under way."""
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
            return  # reply() will tell
        self._asked.add(name)

    def reply(self, name: str) -> dict[str, Any]:
        """The reply to the request ``name``; a :class:`PlannerFailed` where none will come."""
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
        """Drop the request ``name``, which nobody will use, or its reply."""
        self._replies.pop(name, None)
        if name in self._asked:
            self._unwanted.add(name)

    def collect(self) -> None:
        """Take replies that have come, without waiting: a full pipe would hold the process up."""
        while self._process is not None and self._readable.select(0):
            assert self._process.stdout is not None
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                return  # it has ended, which reply() finds
            self._read += data
            while b"\n" in self._read:
                line, _, self._read = self._read.partition(b"\n")
                self._take(line)

    def _take(self, line: bytes) -> None:
        """Keep a reply."""
        reply = json.loads(line)
        name = reply["id"]
        self._asked.discard(name)
        if name in self._unwanted:
            self._unwanted.discard(name)
        else:
            self._replies[name] = reply

    @property
    def unanswered(self) -> int:
        """Requests that the process still works on."""
        return len(self._asked)

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""
        return None if self._process is None else self._process.pid

    @property
    def patience_seconds(self) -> float:
        """How long a reply may take."""
        if self.iteration_seconds is None:
            return MOST_PATIENCE_SECONDS
        patience = PATIENCE_ITERATIONS * self.iteration_seconds
        return min(max(LEAST_PATIENCE_SECONDS, patience), MOST_PATIENCE_SECONDS)

    def _line(self, name: str, began: float) -> bytes:
        """The next line of the process; ``name`` is waited for since ``began``."""
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
        self._profile.seek(0)  # where /dev/fd shares the place in the file, it begins there
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
        """End the process, if there is one, and forget what it was asked."""
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
        self._stop()
        self._profile.close()
        atexit.unregister(self.close)
