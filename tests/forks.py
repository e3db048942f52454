"""Processes for tests that need not import what takes seconds: forked from one that has.

torch takes a process 2 s of a core, Megatron's trainer and its tokenizers 6 s more, and the tests
start hundreds. A fork server (multiprocessing's own) imports once, and what is forked from it is as
fresh as a new process in everything but that: nothing has been built, drawn, connected or parsed in
it. tests/mcore/test_training.py compares a forked job with one that torchrun started.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest.mock import patch

# A server apart from the one that all processes of multiprocessing share, which has Megatron and
# its host in it (megatron_imported.py): torch as it is.
_TORCH = forkserver.ForkServer()
_TORCH.set_forkserver_preload(["tests.torch_alone"])
_WITH_MEGATRON = ["tests.megatron_imported"]


def share_one_server() -> None:
    """Have the certificate's ranks (certify/processes.py) and the tests' own forked from one server
    that has what either needs, whichever asks first."""
    forkserver.set_forkserver_preload(_WITH_MEGATRON)
    forkserver.set_forkserver_preload = lambda modules: None


def with_megatron() -> ForkServerContext:
    """The context of processes that have Megatron's trainer imported already, on the CPU."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_WITH_MEGATRON)
    return context


@contextmanager
def with_torch() -> Iterator[ForkServerContext]:
    """The context of processes that have torch, and nothing else, imported already.

    They must be started inside the ``with``.
    """
    with patch.object(forkserver, "connect_to_new_process", _TORCH.connect_to_new_process):
        yield get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Ended:
    """returncode: as of a subprocess."""

    returncode: int
    stdout: str
    stderr: str


def run_with_torch(program: str, folder: Path, environment: Mapping[str, str]) -> Ended:
    """``python -c program`` in ``folder``, whose modules come first."""
    said = tuple(folder / name for name in ("stdout", "stderr"))
    with with_torch() as context:
        place = {**os.environ, **environment}
        process = context.Process(target=_execute, args=(program, place, str(folder), said))
        process.start()
    process.join()
    return Ended(process.exitcode, *(path.read_text() for path in said))


def _execute(program: str, place: dict[str, str], folder: str, said: tuple[Path, Path]) -> None:
    become(place, folder, *map(str, said))
    assert "megatron_epp" not in sys.modules, "the fork server has the package imported"
    sys.path[:] = [folder, *(path for path in sys.path if not Path(path, "megatron_epp").exists())]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def become(environment: dict[str, str], folder: str, output: str, errors: str = "") -> None:
    """Take on what a new process would have been started with, in a session of its own.

    ``output``: a file to which everything said is appended; what is said to stderr, to ``errors``
    where that is named.
    """
    os.setsid()  # as torchrun has it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, path in ((1, output), (2, errors or output)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
