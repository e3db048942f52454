"""Jobs of several nodes on one host: each node is an agent of torchrun with its ranks."""

import contextlib
import math
import os
import re
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType

import psutil

from tests.attack import strikes
from tests.attack.agents import start_agent
from tests.attack.strikes import Strike
from tests.mcore.runs import ROOT
from tests.waiting import until

# A node whose agent does not answer for a minute is gone, and a round waits as long for nodes that
# it could do without. On a busy machine agents with less patience take each other for dead, and go
# on apart.
_PATIENT = "read_timeout=60,last_call_timeout=60,keep_alive_interval=5,keep_alive_max_attempt=12"


def be_launchers() -> None:
    """Let forked ranks find that torchrun started them, as those in new processes do.

    They look into the environment that their session began with (mcore/trainer/launcher.py): the
    fork server's, which is this process's when the first process is forked.
    """
    os.environ["TORCHELASTIC_RUN_ID"] = "forked"


def printed_losses(output: str) -> list[tuple[int, float]]:
    """Return iterations and their losses, of all starts and ranks that printed them."""
    found = re.findall(r"exact: iteration (\d+) ([-+.e0-9]+) lm loss\n", output)
    return [(int(i), float(x)) for i, x in found]


def losses(output: str) -> dict[int, float]:
    """Return losses by iteration, as the last start that came to it printed them."""
    return dict(printed_losses(output))


def worst_difference(output: str, undisturbed: Mapping[int, float]) -> float:
    """Return how far losses of any start are apart from those of an undisturbed job, relatively."""
    apart = (abs(loss / undisturbed[i] - 1) for i, loss in printed_losses(output))
    return max(apart, default=math.inf)


@dataclass(frozen=True, slots=True)
class Launch:
    """How nodes start ranks: what torchrun is given, for each node.

    nodes        --nnodes
    processes    --nproc-per-node
    restarts     --max-restarts
    """

    nodes: str
    processes: int = 1
    restarts: int = 3


class Nodes:
    """The nodes of a job; leaving the context ends every process of them."""

    def __init__(
        self,
        folder: Path,
        program: str,
        words: Sequence[str],
        launch: Launch,
        struck: Sequence[Strike] = (),
    ):
        """Begin with no node; what all processes print goes to ``log``.

        ``struck``: strikes that the last rank takes, where ``program`` is struck_training.py.
        """
        self.launch, self.folder = launch, folder.absolute()
        self.log, self.temporary = self.folder / "log", self.folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._own = [program, *map(str, words)]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "TMPDIR": str(self.temporary),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **strikes.environment(struck, self.folder),
        }
        self.agents: dict[int, ForkServerProcess] = {}

    def __enter__(self) -> "Nodes":
        """Return the nodes."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Kill what is left."""
        while members := self.members():
            for process in members:
                _kill(process)
            time.sleep(0.1)

    def start(self, node: int) -> None:
        """Start the agent of a node; whichever of them comes first keeps the rendezvous."""
        launch, folder = self.launch, self._folder_of(node)
        folder.mkdir(exist_ok=True)
        words = ["--nnodes", launch.nodes, "--nproc-per-node", str(launch.processes)]
        words += ["--max-restarts", str(launch.restarts), "--monitor-interval", "1"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        words += ["--rdzv-id", str(self.port), "--rdzv-conf", _PATIENT, *self._own]
        self.agents[node] = start_agent(folder, self.log, self._environment, words)
        agent = self.agents[node]
        until(lambda: self.listening() or agent.exitcode is not None, lambda: self.said[-600:])

    def kill(self, node: int) -> None:
        """Kill all processes of a node outright."""
        agent = self.agents.pop(node)
        for process in (agent.pid, *self.members(node)):
            _kill(process)
        agent.join()

    def members(self, node: int | None = None) -> list[int]:
        """Return the living processes of one node, or of all: those that work in its folder."""
        nodes = self.folder.glob("node-*") if node is None else [self._folder_of(node)]
        folders, found = {str(folder) for folder in nodes}, []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{entry}/cwd") in folders:
                        found.append(int(entry))
        return found

    def _folder_of(self, node: int) -> Path:
        return self.folder / f"node-{node}"

    def ranks(self) -> list[int]:
        """Return the processes of ranks that have begun, and live."""
        begun = {int(path.read_text().split()[0]) for path in self.folder.glob("rank-*")}
        return sorted(begun.intersection(self.members()))

    def is_stuck(self, node: int) -> bool:
        """Return whether nothing but a person, or a machine's watchdog, goes on here: this node's
        agent has been stopped, or waits for what the network drops, and no rank runs; or all ranks
        have been stopped."""
        stopped = [_is_stopped(rank) for rank in self.ranks()]
        if not all(stopped):
            return False
        agent = self.agents[node].pid
        everyone = len(stopped) == self.launch.processes * len(self.agents) > 0
        return everyone or _is_stopped(agent) or f"\nsilenced: {agent}\n" in self.said

    def has_ended(self, node: int) -> bool:
        """Return whether nothing of a node lives any more."""
        return self.agents[node].exitcode is not None and not self.members(node)

    def listening(self) -> bool:
        """Return whether the rendezvous accepts connections."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def said(self) -> str:
        """Return what has been printed."""
        return self.log.read_text(errors="replace")

    def last_iteration(self) -> int:
        """Return the last iteration that the end of the log tells of; 0: none."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - (1 << 16)))
            return max(losses(file.read().decode(errors="replace")), default=0)

    def left(self) -> list[str]:
        """Return what a job that has ended left: processes, listening sockets, temporary files.

        Folders for logs that torchrun makes, and leaves, are its own.
        """
        found = [f"process {' '.join(words_of(process)[-3:])}" for process in self.members()]
        if self.listening():
            found.append(f"socket on port {self.port}")
        return found + [
            f"temporary {path.name}"
            for path in sorted(self.temporary.iterdir())
            if not path.name.startswith("torchelastic_")
        ]


def words_of(process: int) -> list[str]:
    """Return the command line of a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).cmdline()
    return []


def _is_stopped(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() == psutil.STATUS_STOPPED
    return False


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
