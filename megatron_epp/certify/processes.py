"""Processes of a certificate, and the requests that the parent process sends to them.

This module does not import torch, because a process first sets environment variables.
"""

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

from megatron_epp.certify.protocol import REFERENCE, Backend, InputRefusal, RequestFailure, Role

# Time that the other ranks may still answer after one has failed; they wait for its messages.
GRACE_SECONDS = 5.0
_SHOWN_LINES = 20


class ChildLost(RuntimeError):
    """Error if a process died or did not answer; the message has its name and last output."""


class Children:
    """Context manager that starts a process for each role, and ends all processes at its exit."""

    def __init__(self, roles: Sequence[Role], backend: Backend):
        self.backend = backend
        self.patience_seconds = roles[0].trial.timeout
        self.roles = {role.rank: role for role in roles}
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}

    def __enter__(self) -> "Children":
        device = "cuda" if any(role.on_gpu for role in self.roles.values()) else "cpu"
        context = start_context(self.backend.preloaded, device)
        for rank, role in self.roles.items():
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=answer_requests, args=(child_end, role, self.backend), daemon=True
            )
            process.start()
            child_end.close()
            self._pipes[rank], self._processes[rank] = parent_end, process
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        for process in self._processes.values():
            if kind is None:
                process.join(GRACE_SECONDS)
            process.kill()
            process.join()

    def ask(self, ranks: Iterable[int], method: str, *arguments: Any) -> dict[int, Any]:
        """Call ``method`` on ``ranks``, and return their answers by rank.

        The answer of a rank that fails is a RequestFailure. From then on, the method waits at most
        GRACE_SECONDS for the other answers, and may return without them.

        Raises:
            ChildLost: if a process ends without an answer, or a rank does not answer in time.
        """
        ranks = list(ranks)
        for rank in ranks:
            self._pipes[rank].send((method, arguments))
        answers: dict[int, Any] = {}
        deadline = self.patience_seconds + time.monotonic()
        while waiting := [rank for rank in ranks if rank not in answers]:
            ready = wait(
                [self._pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                if any(isinstance(answer, RequestFailure) for answer in answers.values()):
                    return answers
                silent = ", ".join(self.roles[rank].name for rank in waiting)
                first = f"{silent}: no answer to {method!r} in {self.patience_seconds:.0f} s"
                raise ChildLost("\n".join([first, *self._last_output(waiting)]))
            for rank in waiting:
                if self._pipes[rank] in ready:
                    answers[rank] = self._receive(rank)
                    if isinstance(answers[rank], RequestFailure):
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _last_output(self, ranks: Iterable[int]) -> list[str]:
        """Terminate ``ranks``; return their log lines on current ops (mcore/trainer/sigterm.py)."""
        for rank in ranks:
            self._processes[rank].terminate()
        words = []
        for rank in ranks:
            self._processes[rank].join(GRACE_SECONDS)
            words += [line for line in self._said(rank) if " terminated: " in line]
        return words

    def _said(self, rank: int) -> list[str]:
        log = self.roles[rank].log
        return log.read_text(errors="replace").splitlines() if log.exists() else []

    def _receive(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError) as error:
            process, role = self._processes[rank], self.roles[rank]
            process.join(GRACE_SECONDS)
            first = f"{role.name} ended with status {process.exitcode}"
            raise ChildLost("\n".join([first, *self._said(rank)[-_SHOWN_LINES:]])) from error


def start_context(
    preloaded: Sequence[str], device: str = "cpu"
) -> ForkServerContext | SpawnContext:
    """Return the context that starts processes: a fork server, or spawn.

    The fork server imports ``preloaded`` once, because importing Megatron takes seconds in each
    process. Processes are spawned on systems other than Linux, where forking a process with torch
    is not safe, and on GPUs (``device`` "cuda"), because each process needs its own CUDA context.
    """
    if sys.platform != "linux" or device == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    return context


# ------------------------------------------------------------------ inside a rank's process


def answer_requests(requests: Connection, role: Role, backend: Backend) -> None:
    """Call the method of each request ``(method, arguments)``, and send back its result.

    Every child process runs this function. The process ends with its parent.
    """
    _redirect(role.log)
    os.environ.update(OMP_NUM_THREADS="1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    if role.on_gpu:
        # float64 is compared; compiling for it takes minutes and gives the same results.
        os.environ.update(LOCAL_RANK=str(role.rank), TORCHDYNAMO_DISABLE="1")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    server: Any = None
    with ExitStack() as until_the_end:
        while True:
            try:
                method, arguments = requests.recv()
            except EOFError:
                return
            try:
                if server is None:
                    server = backend.make_server(role, until_the_end)
                answer = getattr(server, method)(*arguments)
            except Exception as error:
                reads_input = role.rank == REFERENCE or server is None
                if reads_input and backend.is_refusal(error):
                    answer = InputRefusal(str(error))
                else:
                    answer = _failure(error, role)
            requests.send(answer)


def _redirect(log: Path) -> None:
    """Redirect this process's output to a log, which the parent shows if this process dies."""
    stream = log.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(stream.fileno(), descriptor)
    sys.stdout = sys.stderr = stream


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by multiprocessing"
    parent.join()
    os._exit(1)


def _failure(error: Exception, role: Role) -> RequestFailure:
    traceback.print_exc()
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    where = f"{os.path.basename(place.filename)}:{place.lineno}"
    return RequestFailure(f"{role.name}: {what} ({where})", traceback.format_exc())
