"""A small gloo world for tests: one process per rank runs a function and reports."""

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.forks import with_torch
from tests.waiting import LAST_RESORT_SECONDS


def run(
    ranks: int,
    function: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    seconds: float = LAST_RESORT_SECONDS,
) -> list[Any]:
    """``function(rank, *arguments)`` on every rank of a world; its results, or its exception as
    text. A rank that ended otherwise gives its exit status, as an int. ``seconds``: of silence
    until a rank is given up.
    """
    pipes, processes = [], []
    with with_torch() as context:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(theirs, rank, ranks, folder / "meeting", function, arguments)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
    try:
        pairs = zip(pipes, processes, strict=True)
        return [_result(pipe, process, seconds) for pipe, process in pairs]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _result(pipe: Any, process: Any, seconds: float) -> Any:
    assert wait([pipe], seconds), "a rank stayed silent"
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        return process.exitcode


def _rank(pipe: Any, rank: int, ranks: int, meeting: Path, function: Any, arguments: Any) -> None:
    import os

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=meeting.as_uri(),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LAST_RESORT_SECONDS),
    )
    try:
        result = function(rank, *arguments)
    except Exception as error:
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    pipe.send(result)
    # The peers may still be talking; they are ended by whoever reads the results.
    pipe.close()
    process = multiprocessing.current_process()
    assert process is not None
    import time

    time.sleep(LAST_RESORT_SECONDS)
