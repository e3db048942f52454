"""The planner process, seen from the trainer: asked one iteration ahead, replaced when it dies."""

import atexit
import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.devices import GIB

logger = logging.getLogger(__name__)

# A reply that takes longer than this counts as a planner that hangs.
PATIENCE_SECONDS = 300.0
# Trainers come first where cores are few.
NICENESS = 5


class PlannerFailed(RuntimeError):
    """No plan came: the process died, hung, or answered with an error."""


class PlannerRefused(PlannerFailed):
    """The planner lives and says why these documents cannot be planned."""


class PlannerProcess:
    """``python -m megatron_epp serve`` over pipes: requests out, replies in, in one order.

    Requests do not wait; :meth:`reply` waits for one. A process that died is started anew with
    the next request.
    """

    def __init__(self, cost: Cost, options: Any, planner: str, replicas: int):
        self.planner, self.replicas = planner, replicas
        self._folder = tempfile.TemporaryDirectory(prefix="megatron_epp-")
        profile = Path(self._folder.name) / "cost-model.json"
        cost.profile.save(str(profile))
        budgets = [repr(budget / GIB) for budget in cost.budget_bytes]
        self._command = [
            *(sys.executable, "-m", "megatron_epp", "serve"),
            *("--cost-model", str(profile), "--zero", str(cost.zero)),
            *("--pp", str(cost.stages), "--layers", *map(str, cost.layers)),
            *("--tp", str(cost.tp), "--cp", str(cost.cp), "--dp", str(cost.dp)),
            *("--memory-budget-gib", *budgets, "--context", str(options.context)),
            *("--levers", ",".join(sorted(options.levers)) or "none"),
            *("--effort", str(options.effort), "--multiple", str(options.multiple)),
        ]
        self._process: subprocess.Popen | None = None
        self._asked: set[str] = set()
        self._replies: dict[str, dict[str, Any]] = {}
        self._start()
        # Before the folder goes, or a process that is still starting complains of it.
        atexit.register(self.close)

    def ask(self, name: str, lengths: Sequence[int], forward_only: bool) -> None:
        """Send a request unless one of that name is under way."""
        if name in self._asked:
            return
        if self._process is None or self._process.poll() is not None:
            self._start()
        request = {
            "id": name,
            "lengths": list(map(int, lengths)),
            "replicas": self.replicas,
            "planner": self.planner,
            "forward_only": forward_only,
        }
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, OSError):
            return  # reply() will tell
        self._asked.add(name)

    def reply(self, name: str) -> dict[str, Any]:
        """The reply to the request ``name``; a :class:`PlannerFailed` where none will come."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while name not in self._replies:
            if name not in self._asked:
                self._stop()
                raise PlannerFailed("the planner process has ended")
            line = self._line(deadline)
            reply = json.loads(line)
            self._asked.discard(reply["id"])
            self._replies[reply["id"]] = reply
        reply = self._replies.pop(name)
        self._replies.clear()  # whatever was asked and never used
        if reply["error"] is not None:
            raise PlannerRefused(reply["error"])
        return reply

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._read:
            if not self._readable.select(max(0.0, deadline - time.monotonic())):
                self._stop()
                raise PlannerFailed(f"no plan within {PATIENCE_SECONDS:.0f} s")
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                self._stop()
                raise PlannerFailed("the planner process has ended")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _start(self):
        self._stop()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        package = str(Path(__file__).parents[2])
        path = [package, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._read = b""
        self._readable = selectors.DefaultSelector()
        self._readable.register(self._process.stdout, selectors.EVENT_READ)
        try:
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
        except OSError:
            logger.debug("the planner process keeps its priority", exc_info=True)

    def _stop(self):
        """End the process, if there is one, and forget what it was asked."""
        self._asked, self._replies = set(), {}
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._readable.close()
            self._process = None

    def close(self):
        self._stop()
        self._folder.cleanup()
        atexit.unregister(self.close)
        self._folder.cleanup()
