"""Training jobs to be attacked: two small processes of gloo, what they print, and their end."""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest

from tests.attack.commands import DATA_BYTES
from tests.mcore import runs
from tests.mcore.runs import ROOT

_TOKEN = "EPP_ATTACK"
MODULE = ["-m", "megatron_epp.pretrain_gpt"]  # what is trained with
_LOGGED = re.compile(r"iteration +(\d+)/.*?lm loss: ([0-9.E+-]+).*?grad norm: ([0-9.]+)")


def flags(corpus: Path | str, **changes: object) -> list[str]:
    """Flags of a small job; ``changes`` override or add, None takes a flag away."""
    # The learning rate does not depend on --train-iters: a job that is cut short computes what a
    # whole one does.
    steady = {"train_iters": 8, "lr_decay_iters": 100_000, "lr_decay_style": "constant"}
    return runs.flags(corpus, **{**steady, "epp": True, "epp_plan_ahead": True, **changes})


@dataclass(frozen=True, slots=True)
class Logged:
    """Numbers that Megatron printed of an iteration, as text: equal text, equal numbers."""

    loss: str
    grad_norm: str


class Job:
    """Processes of a training job; leaving the context ends every one of them.

    launcher     whether torchrun starts the ranks; else this process does
    wrap         words before the command, as ``unshare -m``
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        *,
        ranks: int = 2,
        launcher: bool = False,
        wrap: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ):
        self.folder, self.words, self.ranks, self.launcher = folder, list(words), ranks, launcher
        self.wrap = list(wrap)
        self.token = uuid.uuid4().hex
        self.log = folder / f"log-{self.token[:6]}"
        self.temporary = folder / f"tmp-{self.token[:6]}"
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.temporary),
            _TOKEN: self.token,
            **(environment or {}),
        }
        self.processes: list[subprocess.Popen] = []

    def __enter__(self) -> "Job":
        self.temporary.mkdir()
        program = [sys.executable]
        own = [*MODULE, *self.words]
        if self.launcher:
            run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            self._start([*program, *run, str(self.ranks), *own], {})
            return self
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        for rank in range(self.ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks}
            numbers = {name: str(value) for name, value in place.items()}
            self._start([*program, *own], {**world, **numbers})
        return self

    def _start(self, command: Sequence[str], more: Mapping[str, str]) -> None:
        with self.log.open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [*self.wrap, *command],
                    cwd=ROOT,
                    env={**self.environment, **more},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_limit,
                )
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for _ in range(3):  # one that is being started is found the next time
            for process in self.members():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.1)
        for started in self.processes:
            started.wait()

    # ------------------------------------------------------------ its processes

    def members(self) -> dict[int, str]:
        """Command lines of the living processes of this job, by process."""
        found = {}
        mark = f"{_TOKEN}={self.token}".encode()
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                        words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                        found[int(entry)] = " ".join(w.decode(errors="replace") for w in words)
        return found

    def rank(self, rank: int) -> int:
        """The process of ``rank``."""
        for process, words in self.members().items():
            if "megatron_epp.pretrain_gpt" in words and "torch.distributed.run" not in words:
                with contextlib.suppress(OSError):
                    environ = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                    if f"RANK={rank}".encode() in environ:
                        return process
        raise AssertionError(f"rank {rank} is not there any more: {self.last_words()}")

    # ------------------------------------------------------------ what it says

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def errors(self) -> list[str]:
        return [line for line in self.said.splitlines() if "megatron_epp: error:" in line]

    def logged(self) -> dict[int, Logged]:
        return {int(number): Logged(*both) for number, *both in _LOGGED.findall(self.said)}

    def last_words(self, characters: int = 300) -> str:
        lines = [line for line in self.said.splitlines() if line.strip()]
        return " / ".join(lines[-4:])[-characters:]

    def wait_for(self, seen: Callable[[], object], what: str, seconds: float) -> None:
        """Until ``seen`` is true. AssertionError: the job ended before, or it took too long."""
        end = time.monotonic() + seconds
        while not seen():
            if all(process.poll() is not None for process in self.processes):
                if seen():
                    return
                raise AssertionError(f"ended before {what}: {self.last_words()}")
            if time.monotonic() > end:
                raise AssertionError(f"no {what} within {seconds:.0f} s: {self.last_words()}")
            time.sleep(0.02)

    def wait_for_iteration(self, number: int, seconds: float = 240) -> None:
        self.wait_for(lambda: number in self.logged(), f"iteration {number}", seconds)

    def wait(self, seconds: float) -> list[int]:
        """Exit statuses. AssertionError: a process still runs after so many seconds."""
        end = time.monotonic() + seconds
        for process in self.processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(
                    f"has not ended within {seconds:.0f} s: {self.last_words()}"
                ) from None
        return [process.returncode for process in self.processes]

    def require_nothing_left(self, seconds: float = 20) -> None:
        """Neither a process nor a temporary folder of ours."""
        end = time.monotonic() + seconds
        while (left := self.members()) and time.monotonic() < end:
            time.sleep(0.1)
        if left:
            raise AssertionError(f"left running: {[words[-80:] for words in left.values()]}")
        if folders := [path.name for path in self.temporary.glob("*megatron_epp*")]:
            raise AssertionError(f"left in the temporary folder: {folders}")

    def require_trained(self, number: int, seconds: float = 240) -> dict[int, Logged]:
        """It ends well, behind iteration ``number``."""
        statuses = self.wait(seconds)
        if any(statuses):
            raise AssertionError(f"exit statuses {statuses}: {self.last_words(600)}")
        if number not in self.logged():
            raise AssertionError(f"iterations {sorted(self.logged())}, expected {number}")
        return self.logged()

    def require_refusal(self, *parts: str, seconds: float = 120) -> None:
        """Every rank leaves with status 2, and one line says why; without a launcher."""
        statuses = self.wait(seconds)
        if set(statuses) != {2} or len(self.errors) != 1 or "Traceback" in self.said:
            raise AssertionError(
                f"exit statuses {statuses}, {len(self.errors)} lines of ours, "
                f"{self.said.count('Traceback')} tracebacks: "
                f"{(self.errors or [self.last_words()])[0][:300]}"
            )
        if missing := [part for part in parts if part not in self.errors[0]]:
            raise AssertionError(f"the line does not name {missing}: {self.errors[0]}")


def require_same(
    mine: Mapping[int, Logged], theirs: Mapping[int, Logged], relative: float = 0.0
) -> None:
    """Iterations that both logged have equal numbers; AssertionError: they have not.

    Megatron's second line after a start shows the mean of two losses: there only the norms count.
    """
    both = sorted(set(mine) & set(theirs))
    second = {sorted(logged)[1] for logged in (mine, theirs) if len(logged) > 1}
    for number in both:
        pairs = [(mine[number].grad_norm, theirs[number].grad_norm)]
        if number not in second:
            pairs.append((mine[number].loss, theirs[number].loss))
        for one, other in pairs:
            if abs(float(one) - float(other)) > relative * abs(float(other)):
                raise AssertionError(
                    f"iteration {number}: {mine[number]}, undisturbed {theirs[number]}"
                )
    if not both:
        raise AssertionError("no iteration to compare")


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own at ``folder``. Skipped where only root may."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


def own_mounts() -> list[str]:
    """Words that give a command mounts of its own. Skipped where the host does not."""
    words = ["unshare", "--mount"]
    with contextlib.suppress(OSError):
        if not subprocess.run([*words, "true"], capture_output=True).returncode:
            return words
    pytest.skip("needs unshare --mount, which needs root")


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
