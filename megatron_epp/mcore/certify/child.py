"""A process of the certificate: waits for requests on a pipe, answers each, ends with its parent.

Importing this must stay light: the environment is set before torch is imported.
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

from megatron_epp.mcore.certify.protocol import PLAIN, Failed, InputRefused, Role


def serve(requests: Connection, role: Role) -> None:
    """Answer ``(method, arguments)`` with the method's result, until the pipe is closed."""
    _redirect(role.log)
    os.environ.update(OMP_NUM_THREADS="1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    if role.on_gpu:
        # float64 is compared; what is compiled for it takes minutes and computes the same.
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
                    server = _server(role, until_the_end)
                answer = getattr(server, method)(*arguments)
            except Exception as error:
                answer = _failure(error, role.rank == PLAIN or server is None, role)
            requests.send(answer)


def _redirect(log: Path) -> None:
    """Megatron talks while it builds; what it says is shown if the process dies."""
    stream = log.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(stream.fileno(), descriptor)
    sys.stdout = sys.stderr = stream


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by multiprocessing"
    parent.join()
    os._exit(1)


def _server(role: Role, until_the_end: ExitStack) -> Any:
    from megatron_epp.mcore.patching import cpu_host, cuda_host, seams

    if role.on_gpu:
        _require_gpu(role.rank)
        cuda_host.prepare(["--epp", "--pipeline-model-parallel-size", str(role.ranks)])
    cpu_host.install_cpu_host()
    seams.install(seams.ALWAYS_SEAMS)
    until_the_end.enter_context(cpu_host.double_precision())
    if role.loop:
        from megatron_epp.mcore.certify.loops.plain import PlainLoop
        from megatron_epp.mcore.certify.loops.rank import LoopRank

        return PlainLoop(role) if role.rank == PLAIN else LoopRank(role)
    if role.rank == PLAIN:
        from megatron_epp.mcore.certify.reference import Plain

        return Plain(role)
    from megatron_epp.mcore.certify.rank import Rank

    return Rank(role)


def _require_gpu(rank: int) -> None:
    from torch.cuda import device_count

    if device_count() <= rank:
        raise ValueError(
            f"--device cuda: every rank needs a GPU, rank {rank} too; this host has "
            f"{device_count()}: certify fewer ranks, or leave the flag out"
        )


def _failure(error: Exception, reads_input: bool, role: Role) -> InputRefused | Failed:
    from megatron_epp.mcore.job_exit import is_users_mistake

    if reads_input and is_users_mistake(error):
        return InputRefused(str(error))
    traceback.print_exc()
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    where = f"{os.path.basename(place.filename)}:{place.lineno}"
    return Failed(f"{role.name}: {what} ({where})", traceback.format_exc())
