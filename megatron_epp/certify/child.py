"""Process of a certificate, which answers requests from a pipe and ends with its parent.

This module does not import torch, because the process first sets environment variables.
"""

import multiprocessing
import os
import sys
import threading
import traceback
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_epp.certify.protocol import REFERENCE, Backend, InputRefusal, RequestFailure, Role


def answer_requests(requests: Connection, role: Role, backend: Backend) -> None:
    """Call the method of each request ``(method, arguments)``, and send back its result."""
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
