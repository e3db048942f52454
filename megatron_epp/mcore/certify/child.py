"""A process of the certificate: waits for requests on a pipe, answers each, ends with its parent.

Importing this must stay light: the environment is set before torch is imported.
"""

import os
import sys
import threading
import time
import traceback
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_epp.mcore.certify.protocol import PLAIN, Failed, InputRefused, Role


def serve(requests: Connection, role: Role) -> None:
    """Answer ``(method, arguments)`` with the method's result, until the pipe is closed."""
    _redirect(role.log)
    # A GPU of this host stays out of it: float64 on the CPU is what the comparison is made in.
    os.environ.update(
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    server: Any = None
    with ExitStack() as until_the_end:
        while True:
            try:
                method, arguments = requests.recv()
            except EOFError:
                return
            try:
                if server is None:
                    server = _server(role, until_the_end)
                answer = getattr(server, method)(*arguments)
            except Exception as error:
                answer = _failure(error, role)
            requests.send(answer)


def _redirect(log: Path) -> None:
    """Megatron talks while it builds; what it says is shown if the process dies."""
    stream = log.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(stream.fileno(), descriptor)
    sys.stdout = sys.stderr = stream


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _server(role: Role, until_the_end: ExitStack) -> Any:
    from megatron_epp.mcore.patching import cpu_host, seams

    cpu_host.install_cpu_host()
    seams.install(seams.ALWAYS_SEAMS)
    until_the_end.enter_context(cpu_host.double_precision())
    if role.rank == PLAIN:
        from megatron_epp.mcore.certify.reference import Plain

        return Plain(role)
    from megatron_epp.mcore.certify.rank import Rank

    return Rank(role)


def _failure(error: Exception, role: Role) -> InputRefused | Failed:
    from megatron_epp.mcore.job_exit import is_users_mistake

    if role.rank == PLAIN and is_users_mistake(error):
        return InputRefused(str(error))
    traceback.print_exc()
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    where = f"{os.path.basename(place.filename)}:{place.lineno}"
    return Failed(f"{role.name}: {what} ({where})", traceback.format_exc())
