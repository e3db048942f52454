"""Choice of the parallel layout at a job's start, among the layouts that --epp-layouts allows.

Rank 0 chooses before Megatron reads its flags. Ranks that the layout does not use are spares.
Spares join no process group, and wait until the training ends or torchrun stops them.
"""

import os
import socket
import sys
import time
from argparse import Namespace
from contextlib import suppress
from typing import Any

from megatron_epp.mcore.choose.from_rank_0 import from_rank_0, start_store
from megatron_epp.mcore.choose.kept import kept_layout, resumes
from megatron_epp.mcore.choose.layouts import (
    ChosenLayout,
    choice,
    predicted_seconds,
    read_layouts,
)
from megatron_epp.mcore.job.read_flags import prepare_parser, refusals_as_value_errors

SPARE_POLL_SECONDS = 0.5


def choose_allowed_layout() -> ChosenLayout | None:
    """Return the layout with which the job starts; None without --epp or --epp-layouts.

    Every rank calls this function. Rank 0 prints the layout. On ranks that train, the function sets
    the environment variable ``WORLD_SIZE`` to the number of ranks that train.

    Raises:
        ValueError: The flags, the file of layouts or the saved choices are not valid, or no layout
            fits.
    """
    if not any(word.partition("=")[0] == "--epp-layouts" for word in sys.argv):
        return None  # do not parse all flags twice
    from megatron.training.arguments import parse_args

    with refusals_as_value_errors():
        wanted = parse_args(prepare_parser)
    if not wanted.epp or wanted.epp_layouts is None:
        return None
    rank, devices = wanted.rank, wanted.world_size

    def facts() -> dict[str, Any]:
        before = as_before(wanted, devices)
        return (before or choice(wanted, devices, predicted_seconds)).facts

    chosen = ChosenLayout.of_facts(from_rank_0(f"layout of {devices} devices", facts))
    if rank == 0:
        print(chosen.line(wanted.epp_layouts), flush=True)
    if rank < chosen.ranks:
        os.environ["WORLD_SIZE"] = str(chosen.ranks)
    return chosen


def as_before(wanted: Namespace, devices: int) -> ChosenLayout | None:
    """Return the layout of the resumed run, if that run had the same number of ``devices``.

    The result is None if the number differs, if the run saved no valid layout, or if --epp-layouts
    no longer allows the layout.

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


# ------------------------------------------------------------------ spares


def wait_as_spare(chosen: ChosenLayout) -> None:
    """Wait, on a spare rank, until the other ranks have finished training."""
    rank, host = os.environ["RANK"], socket.gethostname()
    print(
        f"megatron_epp: rank {rank} on {host} waits as a spare: {chosen.layout} has no place for "
        f"it among {chosen.devices} devices",
        flush=True,
    )
    store, key = start_store(), _end_of(chosen)
    with suppress(RuntimeError):  # the store on rank 0 ends with rank 0
        while not store.check([key]):
            time.sleep(SPARE_POLL_SECONDS)


def release_spares(chosen: ChosenLayout | None) -> None:
    """End the waiting of spares: rank 0 sets the key that they poll; other ranks do nothing."""
    if chosen is not None and chosen.has_spares and os.environ.get("RANK") == "0":
        start_store().set(_end_of(chosen), "ended")


def _end_of(chosen: ChosenLayout) -> str:
    return f"end of {chosen.ranks} of {chosen.devices}"
