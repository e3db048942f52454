"""Values that rank 0 decides at a job's start, before the process group exists.

The other ranks read these values from a key-value store, so no two ranks can decide differently.
"""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from megatron_epp.mcore.job.job_exit import AGENT_STORE, torchrun_store
from megatron_epp.mcore.job.launch_environment import rank_of

POLL_SECONDS, PATIENCE_SECONDS = 0.1, 1800.0


def from_rank_0(what: str, make: Callable[[], Any]) -> Any:
    """Call ``make`` on rank 0, and return its result, a JSON value, on every rank.

    Every rank calls this function. ``what`` names the value in the store and in error messages.

    Raises:
        ValueError: ``make`` raises a ValueError (every rank raises one with the same text); or, on
            ranks other than 0, rank 0 fails with another error or does not answer.
    """
    rank, ranks = rank_of()
    if ranks == 1:
        return make()
    if rank == 0:
        answer: dict[str, Any] = {"error": f"{what}: rank 0 has failed"}
        try:
            answer = {"value": make()}
        except ValueError as refusal:
            answer = {"error": str(refusal)}
            raise
        finally:
            start_store().set(what, json.dumps(answer))
        return answer["value"]
    try:
        store, began = start_store(), time.monotonic()
        while not store.check([what]) and time.monotonic() - began < PATIENCE_SECONDS:
            time.sleep(POLL_SECONDS)  # rank 0 may take longer than the timeout of the store
        answer = json.loads(store.get(what))
    except RuntimeError as gone:
        raise ValueError(f"{what}: rank 0 does not answer ({gone})") from gone
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["value"]


@cache
def start_store() -> Any:
    """Return the key-value store that all ranks of the job share.

    It is torchrun's store. Without torchrun's store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), rank 0
    opens a store at ``MASTER_PORT``, which the process group later uses as well.
    """
    if os.environ.get(AGENT_STORE) == "True":
        return torchrun_store()
    return torch.distributed.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        world_size=None,
        is_master=os.environ["RANK"] == "0",
        timeout=timedelta(seconds=PATIENCE_SECONDS),
        wait_for_workers=False,
        multi_tenant=True,
    )
