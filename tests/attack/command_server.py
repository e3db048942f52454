"""Runs command lines of the package, each in a forked process of a server that has imported it.

A start of the interpreter takes a second without torch and ten with it; a fork takes milliseconds,
and still every command line has a process, limits and an end of its own.

    python -m tests.attack.command_server [--torch]      requests and replies: JSON, one a line
"""

import atexit
import contextlib
import io
import json
import os
import queue
import resource
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
DATA_BYTES = 4 << 30  # private memory of a command line
FILE_BYTES = 1 << 30  # of what it writes
SHOWN_BYTES = 20_000
_PRELOADED = ("megatron_epp.cli.options", "megatron_epp.planner", "megatron_epp.sim")
_PRELOADED += tuple(f"megatron_epp.cli.{name}" for name in ("plan", "compare", "draw", "check"))
# Compiles what is compiled, or loads it. Packing, as the solver's threads would not survive a fork.
_WARMED = "plan --lengths wlb --model gpt-7b --device a100-80g --pp 2 --cp 8 --context 4096"
_WARMED += " --global-batch-size 8 --planner packing"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command line ended. ``status``: as a shell has it, None: it ran out of time.

    ``left``: the command lines of processes of its session that were still there.
    """

    status: int | None
    out: str
    err: str
    seconds: float
    left: list[str]

    @property
    def lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.strip()]


class CommandServer:
    """Servers, as many as threads ask at a time. Leaving the context ends them."""

    def __init__(self, torch: bool = False):
        self._words = [sys.executable, "-m", "tests.attack.command_server", *(["--torch"] * torch)]
        self._all: list[subprocess.Popen[str]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()

    def __enter__(self) -> "CommandServer":
        self._idle.put(self._started())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._all:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()

    def _started(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            self._words,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._all.append(process)
        return process

    def run(
        self,
        words: Sequence[str],
        *,
        entry: str = "epp",
        stdin: str = "",
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        seconds: float = 60,
    ) -> Ended:
        """``entry``: epp (``python -m megatron_epp``), pretrain (``...pretrain_gpt``), or file."""
        request = {
            "words": list(words),
            "entry": entry,
            "stdin": stdin,
            "folder": None if folder is None else str(folder),
            "environment": dict(environment or {}),
            "seconds": seconds,
        }
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = self._started()
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        reply = process.stdout.readline()
        if not reply:
            raise RuntimeError(f"the command server died at {words}")
        self._idle.put(process)
        return Ended(**json.loads(reply))


# ------------------------------------------------------------------ the server's side


def serve(torch: bool) -> None:
    import importlib

    replies = os.fdopen(os.dup(1), "w")  # children print to 1
    os.dup2(2, 1)
    for name in _PRELOADED:
        importlib.import_module(name)
    if torch:
        from megatron_epp.mcore.patching import cpu_host

        cpu_host.install_cpu_host()
        for name in (
            "megatron.training",
            "megatron_epp.mcore.trainer.entry",
            "megatron_epp.mcore.trainer.setup",
        ):
            importlib.import_module(name)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = _command("epp", _WARMED.split())
    if status:
        raise RuntimeError(f"a good command line failed: {_WARMED}: {said.getvalue()}")
    for line in sys.stdin:
        replies.write(json.dumps(_run(json.loads(line))) + "\n")
        replies.flush()


def _run(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            _be_the_command(request, out.fileno(), err.fileno())
        descriptor = os.pidfd_open(child)
        try:
            in_time = bool(select.select([descriptor], [], [], request["seconds"])[0])
        finally:
            os.close(descriptor)
        seconds = time.monotonic() - started
        left = _end_session(child, grace_seconds=2 if in_time else 0)
        _, status = os.waitpid(child, 0)
        return {
            "status": os.waitstatus_to_exitcode(status) if in_time else None,
            "out": _shown(out),
            "err": _shown(err),
            "seconds": seconds,
            "left": left,
        }


def _end_session(leader: int, grace_seconds: float) -> list[str]:
    """End a session, the leader included if it lives; the command lines of the others."""
    end = time.monotonic() + grace_seconds
    while (others := _session(leader) - {leader}) and time.monotonic() < end:
        time.sleep(0.05)
    left = [_command_line(process) for process in others]
    for process in (leader, *others):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return left


def _command_line(process: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        return b" ".join(words).decode(errors="replace").strip()
    return "one that has ended since"


def _session(leader: int) -> set[int]:
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, session = (
                    Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
                )
                if int(session) == leader and state != "Z":
                    found.add(int(entry))
    return found


def _shown(file: Any) -> str:
    """Its end."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - SHOWN_BYTES))
    return file.read().decode("utf-8", errors="replace")


def _be_the_command(request: dict[str, Any], out: int, err: int) -> None:
    """In the forked child; never returns."""
    status = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        read, write = os.pipe()
        os.write(write, request["stdin"].encode()[:60_000])
        os.close(write)
        for descriptor, target in ((read, 0), (out, 1), (err, 2)):
            os.dup2(descriptor, target)
        os.environ.update(request["environment"])
        tempfile.tempdir = None  # the server's
        if request["folder"] is not None:
            os.chdir(request["folder"])
        sys.stdin = os.fdopen(0)
        for category in (RuntimeWarning, UserWarning):  # also where the server has warned before
            warnings.simplefilter("default", category)
        status = _command(request["entry"], request["words"])
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()  # as at an interpreter's end
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _command(entry: str, words: list[str]) -> int:
    sys.argv = [entry, *words]
    if entry == "pretrain":
        from megatron_epp.pretrain_gpt import run

        run()
        return 0
    if entry == "file":
        runpy.run_path(words[0], run_name="__main__")
        return 0
    from megatron_epp.__main__ import main

    return main(words)


if __name__ == "__main__":
    serve("--torch" in sys.argv[1:])
