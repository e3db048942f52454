"""Search of layouts for fewer devices during training, so that a restart need not search.

Rank 0 starts a process (search_process.py) that searches layouts for the job after the loss of 1, 2
or 4 nodes. Rank 0 saves the layouts next to the checkpoint, with a digest of the search's inputs.
A restart uses a saved layout only if the inputs at the restart have the same digest. A search at
the restart would then choose the same layout.
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
# The cost model may be refitted every 20 iterations, which may take less time than a search.
LEAST_SECONDS_BETWEEN = 60.0
# Planner processes have 5, so they take precedence on hosts with few cores.
NICENESS = 19
_PROCESS = "megatron_epp.mcore.choose.search_process"
# Flags that differ between starts of a job. The digest covers the layouts, not their file's name.
_OF_A_START = {
    "rank",
    "world_size",
    "inprocess_active_world_size",  # also set from the environment
    "local_rank",
    "load",
    "save",
    "epp_layouts",
    "epp_search_ahead",
}


def search_digest(wanted: Namespace, folder: str) -> str:
    """Return a digest of all inputs of a layout search except the number of devices.

    Args:
        wanted: Megatron's flags, not validated.
        folder: Folder of the checkpoint, which may contain a measured cost model.

    Raises:
        ValueError: The allowed layouts cannot be read.
        OSError: The cost model cannot be read.
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
    node = os.environ.get("LOCAL_WORLD_SIZE", "1")  # limits the tensor-parallel degree
    package = sys.modules[__name__.partition(".")[0]]  # its next release may choose differently
    text = json.dumps([package.__version__, flags, allowed, costs, node], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def layout_kept_ahead(wanted: Namespace, devices: int) -> ChosenLayout | None:
    """Return the layout that the resumed run has saved for ``devices`` ranks, if it is valid.

    The result is None in three cases: there is no such layout, the search's inputs have changed, or
    the checkpoint cannot be loaded with it. If the file cannot be read, the function prints a line
    and returns None.

    Raises:
        ValueError: The checkpoint's saved choices are damaged.
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
    """Return the saved layouts by number of devices, or {} if the file has another digest.

    Raises:
        ValueError: The file is not valid.
        OSError: The file cannot be read.
    """
    kept = json.loads(bounded_text(path, "layouts that were searched ahead"))
    return dict(kept["layouts"]) if kept["searched_for"] == digest else {}


class SearchAhead:
    """Search of layouts for fewer devices, in a child process of rank 0 during training."""

    def __init__(self, args: Any, words: Sequence[str], now: Callable[[], float] = time.monotonic):
        """Prepare the search, which :meth:`look` starts.

        Args:
            args: Megatron's validated arguments, with the layout that this run uses.
            words: The user's command line.
            now: Clock in seconds. By this clock, searches start at least 60 seconds apart.
        """
        facts, node = getattr(args, LAYOUT_KEY), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._path = Path(args.save) / AHEAD_FILE
        left = (facts["devices"] - lost * node for lost in LOST_NODES)
        self.devices = [devices for devices in left if devices > 0]
        request: dict[str, Any] = {"devices": self.devices, "save": args.save, "ep": facts["ep"]}
        if args.epp_memory_budget_gib is None and cpu_host.has_gpu():
            # The search runs during training, when less memory is free than at a start.
            request["budget_gib"] = default_budget_bytes(args) / GIB
        self._request, self._words, self._now = request, list(words), now
        self._process: subprocess.Popen[bytes] | None = None
        self._stale, self._began = True, -LEAST_SECONDS_BETWEEN
        atexit.register(self.close)

    def look(self, refitted: bool) -> None:
        """Save the result if a search has finished; start a search if the inputs have changed.

        Rank 0 calls this method after every iteration.

        Args:
            refitted: Whether the cost model has changed since the last call.

        Raises:
            OSError: The file of layouts cannot be written.
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
            stderr=subprocess.DEVNULL,  # warnings of Megatron that this start has already printed
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)},
        )
        with suppress(OSError):  # without permission, the priority is unchanged
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        return process

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        """Save the layouts that the finished ``process`` has printed, and log a line."""
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
        """Kill the search process if it is running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        atexit.unregister(self.close)
