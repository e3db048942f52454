"""A ``python`` for scripts that start it often: what it runs is forked from the tests' server.

    with forked_python() as python:
        subprocess.run(["bash", script], env={**os.environ, "python": python})

A small client hands over its words, environment and output, waits, and ends with the program's
status; where it is killed, so is the program, with all that it started. torchrun's ranks, and what
a program forks itself, come from the same server, so that nothing is imported twice.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any

from tests.forks import become, with_megatron
from tests.mcore import runs

_CLIENT = """\
#!{python} -SI
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect({address!r})
    place = dict(os.environ)
    output = "/proc/%d/fd/1" % os.getpid()
    link.sendall(json.dumps([sys.argv[1:], place, output]).encode() + b"\\n")
    status = int(link.makefile().readline() or 1)
sys.exit(status if status >= 0 else 128 - status)
"""
_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@contextmanager
def forked_python() -> Iterator[Path]:
    """The path of such a ``python``, as long as the context lasts."""
    context = with_megatron()
    forkserver.ensure_running()
    server = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        client, address = Path(folder, "python"), str(Path(folder, "socket"))
        client.write_text(_CLIENT.format(python=sys.executable, address=address))
        client.chmod(0o755)
        listener.bind(address)
        listener.listen()

        def serve(link: socket.socket) -> None:
            with link:
                asked = json.loads(link.makefile().readline())
                program: Any = context.Process(target=_run, args=(*asked, server, str(client)))
                program.start()
                # A client says no more: one that can be read is gone.
                if program.sentinel not in wait([program.sentinel, link]):
                    with suppress(ProcessLookupError):
                        os.killpg(program.pid, signal.SIGKILL)
                program.join()
                with suppress(OSError):
                    link.sendall(f"{program.exitcode}\n".encode())

        def accept() -> None:
            with suppress(OSError):  # the listener is closed
                while True:
                    Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        Thread(target=accept, daemon=True).start()
        yield client
        listener.shutdown(socket.SHUT_RDWR)


def _run(
    words: Sequence[str], place: dict[str, str], output: str, server: str, client: str
) -> None:
    """In the forked process: ``python words``."""
    own: Any = forkserver._forkserver  # type: ignore[attr-defined]
    own._forkserver_address, own.ensure_running = server, lambda: None
    sys.executable = client
    if list(words[:4]) == _TORCHRUN:
        become(place, str(runs.ROOT), output)
        ranks, words = int(words[4]), words[5:]
        program = 2 if words[0] == "-m" else 1
        ran = runs.train(list(words[program:]), ranks, tuple(words[:program]))
        print(ran.output)
        sys.exit(ran.status)
    program = 2 if words[0] == "-m" else 1
    runs.run_program(place, output, tuple(words[:program]), list(words[program:]))


if __name__ == "__main__":
    with forked_python() as python:
        command = [sys.argv[1], *sys.argv[2:]]
        sys.exit(subprocess.run(command, env={**os.environ, "python": str(python)}).returncode)
