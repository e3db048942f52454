"""Layouts for fewer devices, searched while training runs, so that a restart starts at once.

Rank 0 has a process of its own (search_process.py) search the layouts of a job that lost 1, 2 or 4
nodes, and keeps them next to the checkpoint with a digest of what they were searched for. A start
takes an entry only where the digest is its own: the layout is then the one that its search would
choose.
"""

import atexit
import copy
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_epp.control.files import write_atomically
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.mcore.choose.choices import cost_models
from megatron_epp.mcore.choose.layouts import (
    ALL_LAYOUTS,
    ChosenLayout,
    read_layouts,
    resume_refusal,
)
from megatron_epp.mcore.flags.config import ANALYTIC, LAYOUT_KEY
from megatron_epp.mcore.job.job_cost import default_budget_bytes, device_name
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.safe_files import bounded_text

logger = logging.getLogger(__name__)

AHEAD_FILE = "epp-layouts-ahead.json"  # {"searched_for": digest, "layouts": {"6": {...}, ...}}
LOST_NODES = 1, 2, 4
# Refits come at most every 20 iterations, which may be less than a search takes.
LEAST_SECONDS_BETWEEN = 60.0
# Below that of planner processes, which have 5: a plan comes first where cores are few.
NICENESS = 19
_PROCESS = "megatron_epp.mcore.choose.search_process"
# Of a start, not of the job; the layouts count by what they are, not by the name of their file.
_OF_A_START = {
    "rank",
    "world_size",
    "inprocess_active_world_size",  # of the environment, too
    "local_rank",
    "load",
    "save",
    "epp_layouts",
    "epp_search_ahead",
}


def search_digest(wanted: Namespace, folder: str) -> str:
    """Return a digest of what the search of ``wanted`` depends on, but for the number of devices.

    Args:
        wanted: Megatron's flags, not validated.
        folder: of the checkpoint, next to which a measured cost model lies.

    Raises:
        ValueError: the layouts cannot be read.
        OSError: the cost model cannot be read.
    """
    flags = {name: repr(value) for name, value in vars(wanted).items() if name not in _OF_A_START}
    allowed = wanted.epp_layouts
    if allowed != ALL_LAYOUTS:
        allowed = [str(layout) for layout in read_layouts(allowed)]
    resumed = copy.copy(wanted)
    resumed.load = folder
    source = next(cost_models(resumed))
    if source in (None, ANALYTIC):
        costs = device_name()
    else:
        costs = bounded_text(Path(str(source)), "a cost model")
    node = os.environ.get("LOCAL_WORLD_SIZE", "1")  # within which tensors are sharded
    package = sys.modules[__name__.partition(".")[0]]  # whose next release may search otherwise
    text = json.dumps([package.__version__, flags, allowed, costs, node], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def layout_kept_ahead(wanted: Namespace, devices: int) -> ChosenLayout | None:
    """Return the layout that the run before searched for as many ``devices``; None: it has none.

    ValueError: the layouts that are allowed cannot be read.
    """
    path = Path(wanted.load or "") / AHEAD_FILE
    if not wanted.load or not path.exists():
        return None
    try:
        digest = search_digest(wanted, wanted.load)
        entry = read_ahead(path, digest).get(str(devices))
        chosen = None if entry is None else ChosenLayout.from_json(json.dumps(entry))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        print(f"{path}: of no use ({error}); searching anew", flush=True)
        return None
    if chosen is None or chosen.devices != devices or not 1 <= chosen.ranks <= devices:
        return None
    return None if resume_refusal(wanted, chosen.layout) else chosen


def read_ahead(path: Path, digest: str) -> dict[str, Any]:
    """Return what was searched for ``digest``, by the number of devices; empty: nothing was.

    ValueError: the file is none of ours. OSError: it cannot be read.
    """
    kept = json.loads(bounded_text(path, "layouts that were searched ahead"))
    return dict(kept["layouts"]) if kept["searched_for"] == digest else {}


class SearchAhead:
    """The search of a job's layouts on fewer devices, seen from rank 0, which trains meanwhile."""

    def __init__(self, args: Any, words: Sequence[str], now: Callable[[], float] = time.monotonic):
        """Search nothing yet.

        Args:
            args: Megatron's, validated, with the layout of this start.
            words: the command line, as it was typed.
            now: the clock that says when a search is too soon after another.
        """
        facts, node = getattr(args, LAYOUT_KEY), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._path = Path(args.save) / AHEAD_FILE
        left = (facts["devices"] - lost * node for lost in LOST_NODES)
        self.devices = [devices for devices in left if devices > 0]
        request: dict[str, Any] = {"devices": self.devices, "save": args.save, "ep": facts["ep"]}
        if args.epp_memory_budget_gib is None and cpu_host.has_gpu():
            # What training leaves of a device is not what a start finds.
            request["budget_gib"] = default_budget_bytes(args) / GIB
        self._request, self._words, self._now = request, list(words), now
        self._process: subprocess.Popen[bytes] | None = None
        self._stale, self._began = True, -LEAST_SECONDS_BETWEEN
        atexit.register(self.close)

    def look(self, refitted: bool) -> None:
        """Start a search that is due, or keep what one has found; called after an iteration.

        ``refitted``: the cost model is another one now. OSError: the file cannot be written.
        """
        self._stale = self._stale or refitted
        if self._process is not None:
            if self._process.poll() is not None:
                self._keep(self._process)
        elif self.devices and self._stale and self._now() - self._began >= LEAST_SECONDS_BETWEEN:
            self._stale, self._began = False, self._now()
            self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        package = str(Path(__file__).parents[3])
        path = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", _PROCESS, json.dumps(self._request), *self._words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Megatron's warnings, which this start has shown
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)},
        )
        with suppress(OSError):  # then it keeps its priority
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        return process

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        """Write what the process found, which has ended, and say so."""
        assert process.stdout is not None
        text, self._process = process.stdout.read(), None
        process.stdout.close()
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {"error": f"the process ended with status {process.returncode}"}
        if "error" in answer:
            logger.warning(
                "layouts for fewer devices are not searched ahead (%s): a restart searches its own",
                answer["error"],
            )
            return
        write_atomically(self._path, json.dumps(answer) + "\n")
        numbers = ", ".join(sorted(answer["layouts"], key=int)) or "no number of"
        logger.info(
            "layouts for %s devices are searched ahead in %.0f s, kept in %s",
            numbers, self._now() - self._began, self._path,
        )  # fmt: skip

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        atexit.unregister(self.close)
