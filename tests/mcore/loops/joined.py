"""Processes of a test that meet, and leave their answers, in a folder that all of them know."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.mcore.patching import cpu_host
from tests.waiting import LAST_RESORT_SECONDS


@contextmanager
def joined(ranks: int) -> Iterator[tuple[int, Path, dict[str, Any]]]:
    """(rank, folder, answers) of this process, one of ``ranks`` that are run with the folder as
    their argument: in one world over gloo, with float64 as torch's format. What is in ``answers``
    at the end is written to the folder as JSON."""
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "meeting"), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LAST_RESORT_SECONDS),
    )
    answers: dict[str, Any] = {}
    with cpu_host.double_precision():
        yield rank, folder, answers
    (folder / f"answers.{rank}").write_text(json.dumps(answers))
