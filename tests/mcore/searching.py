"""``double_losses`` on nodes of one device; its last iteration waits for the search of layouts."""

import os
import runpy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from megatron.training import get_args, training

log = training.training_log


def training_log(losses: Any, total: Any, rate: Any, iteration: int, *rest: Any, **named: Any):
    result = log(losses, total, rate, iteration, *rest, **named)
    if iteration == get_args().train_iters - 1:
        for search in psutil.Process().children():
            if any("search_process" in word for word in search.cmdline()):
                # It stays for the job, which asks for it after the next iteration.
                os.waitid(os.P_PID, search.pid, os.WEXITED | os.WNOWAIT)
    return result


def say_priority(which: int, process: int, niceness: int) -> None:
    """Say how low it is; on a busy machine the search would take for ever at that."""
    print(f"a search by rank {os.environ['RANK']} with niceness {niceness}", flush=True)


if __name__ == "__main__":
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    training.training_log = training_log
    with patch.object(os, "setpriority", say_priority):
        runpy.run_path(str(Path(__file__).with_name("double_losses.py")), run_name="__main__")
