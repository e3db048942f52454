"""Command lines of the package, each in a forked process with limits and a session of its own."""

import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from tests.forks import become, with_megatron
from tests.mcore.runs import PROGRAM, ROOT, execute
from tests.waiting import LAST_RESORT_SECONDS

EPP, PRETRAIN = ("-m", "megatron_epp"), PROGRAM
DATA_BYTES = 4 << 30  # private memory of a command line
FILE_BYTES = 1 << 30  # of what it writes
SHOWN_CHARACTERS = 20_000
LOAD, GRACE_SECONDS = 20, 40.0  # how much slower a busy host may be; 20 times what is seen


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command line ended. ``status``: its exit status, None: it ran out of time.

    ``left``: the command lines of processes of its session that were still there.
    """

    status: int | None
    out: str
    err: str
    left: list[str]

    @property
    def lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.strip()]


def run(
    words: Sequence[str],
    *,
    program: tuple[str, ...] = EPP,
    stdin: str = "",
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    seconds: float = LAST_RESORT_SECONDS,
    grace_seconds: float = GRACE_SECONDS,
) -> Ended:
    """Run ``program``, as Python's command line would, in ``folder``.

    ``seconds``: of a processor, however busy the host is; what waits is ended after LOAD times as
    many. ``grace_seconds``: in which other processes of its session may end after it.
    """
    place = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    with tempfile.TemporaryDirectory() as streams:
        paths = [Path(streams, name) for name in ("out", "err")]
        streams_of = [*map(str, paths)]
        arguments = (place, str(folder), streams_of, stdin, program, list(words), ceil(seconds))
        process = with_megatron().Process(target=_run, args=arguments)
        process.start()
        process.join(min(LOAD * seconds, LAST_RESORT_SECONDS))
        status = None if process.exitcode == -signal.SIGXCPU else process.exitcode
        left = _end_session(process.pid, 0 if status is None else grace_seconds)
        process.join()
        shown = [path.read_text(errors="replace")[-SHOWN_CHARACTERS:] for path in paths]
        return Ended(status, *shown, left)


def _run(
    place: dict[str, str],
    folder: str,
    streams: list[str],
    stdin: str,
    program: tuple[str, ...],
    words: list[str],
    cpu_seconds: int,
) -> None:
    """In the forked process."""
    become(place, folder, *streams)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    read, write = os.pipe()
    os.write(write, stdin.encode()[:60_000])
    os.close(write)
    os.dup2(read, 0)
    sys.stdin = os.fdopen(0)
    tempfile.tempdir = None  # the server's
    for category in (RuntimeWarning, UserWarning):  # also where the server has warned before
        warnings.simplefilter("default", category)
    execute(program, words)


def _end_session(leader: int, grace_seconds: float) -> list[str]:
    """End a session, the leader included if it lives; the command lines of the others."""
    end = time.monotonic() + grace_seconds
    while (others := _session(leader) - {leader}) and time.monotonic() < end:
        time.sleep(0.05)
    left = [_command_line(process) for process in others]
    for process in (leader, *others):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return left


def _command_line(process: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        return b" ".join(words).decode(errors="replace").strip()
    return "one that has ended since"


def _session(leader: int) -> set[int]:
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                state, _, _, session = (
                    Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
                )
                if int(session) == leader and state != "Z":
                    found.add(int(entry))
    return found
