"""``python -m megatron_epp.mcore.choose.search_process REQUEST FLAGS``: layouts for fewer devices.

Rank 0 of a job starts this process (ahead.py) with the job's flags. The process joins no process
group, creates no CUDA context, and ends when rank 0 ends.

    REQUEST   {"devices": [6, 4], "save": "folder", "ep": 1, "budget_gib": 70.0}
              ep: expert-parallel size of the job, with which optimizer states can be loaded
              budget_gib: memory budget of a device before training; if missing, the flags decide
    answer    {"searched_for": digest, "layouts": {"6": {...}, "4": {...}}}, or {"error": line};
              layouts omits numbers of devices that no layout fits
"""

import json
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def answered(request: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Search layouts for the job with the flags ``words``, and return the answer.

    The function reuses layouts that an earlier search with the same inputs has saved.

    Raises:
        ValueError: The flags or the allowed layouts are not valid.
    """
    from megatron.training.arguments import parse_args

    from megatron_epp.mcore.choose.ahead import AHEAD_FILE, read_ahead, search_digest
    from megatron_epp.mcore.job.read_flags import prepare_parser, refusals_as_value_errors

    sys.argv = [sys.argv[0], *words]
    with refusals_as_value_errors():
        typed = parse_args(prepare_parser)
        digest = search_digest(typed, request["save"])
        # The restart resumes from the checkpoints that this job saves.
        sys.argv += ["--load", request["save"]]
        if "budget_gib" in request:
            sys.argv += ["--epp-memory-budget-gib", repr(request["budget_gib"])]
        wanted = parse_args(prepare_parser)
    layouts: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError, KeyError):
        layouts = read_ahead(Path(request["save"]) / AHEAD_FILE, digest)
    for devices in request["devices"]:
        if str(devices) not in layouts:
            with suppress(ValueError):  # no layout fits so few
                layouts[str(devices)] = _searched(wanted, devices, request["ep"])
    return {"searched_for": digest, "layouts": layouts}


def _searched(wanted: Namespace, devices: int, ep: int) -> dict[str, Any]:
    from megatron_epp.mcore.choose.layouts import ALL_LAYOUTS, choice, predicted_seconds
    from megatron_epp.mcore.choose.search_layouts import searched

    if wanted.epp_layouts == ALL_LAYOUTS:
        chosen = searched(wanted, devices)
    else:
        chosen = choice(wanted, devices, predicted_seconds, ep)
    return dict(json.loads(chosen.to_json()))


def main() -> None:
    """Print the answer to the request that the command line contains."""
    from megatron_epp.control.planner_process import end_with_reader
    from megatron_epp.mcore.patching import cpu_host, patch_points

    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        threading.Thread(target=end_with_reader, args=(answers.fileno(),), daemon=True).start()
        request, words = json.loads(sys.argv[1]), sys.argv[2:]
        cpu_host.install_cpu_host()
        patch_points.install(patch_points.ALWAYS_PATCH_POINTS)
        try:
            answer = answered(request, words)
        except Exception as error:  # no error of the search may stop the training
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        answers.write(json.dumps(answer))


if __name__ == "__main__":
    main()
