"""Choice of the parallel layout at a start, among the layouts that --epp-layouts allows.

Rank 0 chooses before Megatron reads its flags, and the other ranks read the choice from torchrun's
store. Ranks that the layout does not use are spares. Spares join no process group, and wait until
the training ends or torchrun stops them.
"""

import json
import os
import socket
import sys
import time
from argparse import Namespace
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from megatron_epp.mcore.choose.kept import kept_layout, resumes
from megatron_epp.mcore.choose.layouts import (
    ChosenLayout,
    choice,
    predicted_seconds,
    read_layouts,
)
from megatron_epp.mcore.job.job_exit import AGENT_STORE, torchrun_store
from megatron_epp.mcore.job.read_flags import prepare_parser, refusals_as_value_errors

SPARE_POLL_SECONDS, SPARE_PATIENCE_SECONDS = 0.5, 1800.0


def choose_allowed_layout() -> ChosenLayout | None:
    """Return the layout with which the job starts; None without --epp or --epp-layouts.

    Every rank calls this function. On ranks that train, it sets the environment variable
    ``WORLD_SIZE`` to the number of ranks that train.

    Raises:
        ValueError: The file of layouts is not valid, or no layout fits.
    """
    if not any(word.partition("=")[0] == "--epp-layouts" for word in sys.argv):
        return None  # do not parse all flags twice
    from megatron.training.arguments import parse_args

    with refusals_as_value_errors():
        wanted = parse_args(prepare_parser)
    if not wanted.epp or wanted.epp_layouts is None:
        return None
    rank, devices = wanted.rank, wanted.world_size
    key = f"layout of {devices}"
    if rank == 0:
        answer = ""
        try:
            chosen = as_before(wanted, devices) or choice(wanted, devices, predicted_seconds)
            answer = json.dumps(chosen.facts)
        finally:
            if devices > 1:
                meeting_store().set(key, answer)
        print(chosen.line(wanted.epp_layouts), flush=True)
    else:
        store, began = meeting_store(), time.monotonic()
        while not store.check([key]) and time.monotonic() - began < SPARE_PATIENCE_SECONDS:
            time.sleep(SPARE_POLL_SECONDS)  # the choice may outlast the timeout of the store
        answer = store.get(key).decode()
        if not answer:
            raise ValueError(f"--epp-layouts {wanted.epp_layouts}: rank 0 has chosen none")
        chosen = ChosenLayout.of_facts(json.loads(answer))
    if rank < chosen.ranks:
        os.environ["WORLD_SIZE"] = str(chosen.ranks)
    return chosen


def as_before(wanted: Namespace, devices: int) -> ChosenLayout | None:
    """Return the layout of the resumed run, if that run had the same number of ``devices``.

    The result is None if the number differs, if the run saved no layout, or if --epp-layouts no
    longer allows the layout.

    Raises:
        ValueError: The file of layouts or the file of saved choices is not valid.
    """
    kept = kept_layout(wanted) if resumes(wanted) else None
    if kept is None or kept.get("devices") != devices:
        return None
    try:
        before = ChosenLayout.of_facts(kept)
    except (TypeError, ValueError):
        return None
    return before if before.layout in read_layouts(wanted.epp_layouts) else None


@cache
def meeting_store() -> Any:
    """Return the key-value store that all ranks of a start share.

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
        timeout=timedelta(seconds=SPARE_PATIENCE_SECONDS),
        wait_for_workers=False,
        multi_tenant=True,
    )


# ------------------------------------------------------------------ spares


def wait_as_spare(chosen: ChosenLayout) -> None:
    """Wait, on a spare rank, until the other ranks have finished training."""
    rank, host = os.environ["RANK"], socket.gethostname()
    print(
        f"megatron_epp: rank {rank} on {host} waits as a spare: {chosen.layout} has no place for "
        f"it among {chosen.devices} devices",
        flush=True,
    )
    store, key = meeting_store(), _end_of(chosen)
    with suppress(RuntimeError):  # the store on rank 0 ends with rank 0
        while not store.check([key]):
            time.sleep(SPARE_POLL_SECONDS)


def release_spares(chosen: ChosenLayout | None) -> None:
    """End the waiting of spares: rank 0 sets the key that they poll; other ranks do nothing."""
    if chosen is not None and chosen.has_spares and os.environ.get("RANK") == "0":
        meeting_store().set(_end_of(chosen), "ended")


def _end_of(chosen: ChosenLayout) -> str:
    return f"end of {chosen.ranks} of {chosen.devices}"
