"""Processes for tests that need not import what takes seconds: forked from one that has.

torch takes a process 2 s of a core and Megatron's trainer 6 s more, and the tests start hundreds.
A fork server (multiprocessing's own) imports once, and what is forked from it is as fresh as a new
process in everything but that: nothing has been built, drawn, connected or parsed in it.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from unittest.mock import patch

# A server apart from the one that all processes of multiprocessing share, which has Megatron and
# its host in it (mcore/patching/preloaded.py): torch as it is.
_TORCH = forkserver.ForkServer()
_TORCH.set_forkserver_preload(["tests.torch_alone"])


@contextmanager
def with_torch() -> Iterator[ForkServerContext]:
    """The context of processes that have torch, and nothing else, imported already.

    They must be started inside the ``with``.
    """
    with patch.object(forkserver, "connect_to_new_process", _TORCH.connect_to_new_process):
        yield get_context("forkserver")


def become(environment: dict[str, str], folder: str, output: str) -> None:
    """Take on what a new process would have been started with.

    ``output``: a file to which everything said is appended.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
