"""Table of the layouts and documents that fit on each number of devices."""

import argparse
import json

from megatron_epp.cli.progress import Workers, bar
from megatron_epp.cli.tune.describe import NOT_PLANNED, labelled, model_summary, states_bytes
from megatron_epp.cli.tune.job import TunedJob, job_of
from megatron_epp.cost.catalogue.hub_file import HubConfig
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.planner.tuning.capacity import Capacity, capacity
from megatron_epp.show.table import text_table
from megatron_epp.show.units import GIB

_HEADERS = ("devices", "GiB spread evenly", "layouts", "fit", "longest document", "held by")
_LEGEND = """\
GiB spread evenly  of weights, gradients and optimizer on each device, if all shared them
layouts, fit       tp x cp x pp x dp (x ep of experts) that fill the devices, and of these the ones
                   that hold the states
longest document   tokens of one document that fits next to the states, everything recomputed
held by            the layout that holds it, and the GiB of states of its fullest device\
"""


def how_many(model: Model, config: HubConfig | None, arguments: argparse.Namespace) -> int:
    """Print what fits on each number in --gpus; return the exit status, 130 if interrupted."""
    jobs = [job_of(arguments, model, config, gpus) for gpus in arguments.gpus or (None,)]
    fits: list[Capacity] = []
    status = 0
    with Workers() as run:
        try:
            for each in bar(run(_fit, [(job,) for job in jobs]), len(jobs), "devices"):
                fits.append(each)  # one at a time, so that an interrupt keeps the results so far
        except KeyboardInterrupt:
            if not fits:
                raise
            jobs, status = jobs[: len(fits)], 130
    if arguments.json:
        rows = [
            {
                "gpus": job.devices,
                "layouts": each.layouts,
                "fitting": each.fitting,
                "longest_document": each.tokens,
                "layout": str(each.best) if each.best else None,
                "states_bytes": each.states_bytes,
            }
            for job, each in zip(jobs, fits, strict=True)
        ]
        print(
            json.dumps({"model": model.name, "device": jobs[0].device.name, "rows": rows}, indent=1)
        )
        return status
    budget = (arguments.memory_budget_gib or (jobs[0].device.budget_gib,))[0]
    print(model_summary(model))
    print(labelled("verdict", _verdict(jobs, fits, arguments.context)))
    print(labelled("device", f"{jobs[0].device.name}, budget {budget:g} GiB"))
    print(labelled("not planned", NOT_PLANNED))
    print()
    print(text_table(_HEADERS, [_row(*each) for each in zip(jobs, fits, strict=True)]), end="")
    print(_LEGEND)
    return status


def _fit(job: TunedJob) -> Capacity:
    return capacity(job.layouts(job.devices), job.cost_for)


def _row(job: TunedJob, each: Capacity) -> list[str]:
    evenly = states_bytes(job.model) / job.devices / GIB
    cells = [str(job.devices), f"{evenly:.1f}", str(each.layouts), str(each.fitting)]
    if each.best is None:
        return [*cells, "-", "none"]
    return [*cells, str(each.tokens), f"{each.best}, {each.states_bytes / GIB:.1f}"]


def _verdict(jobs: list[TunedJob], fits: list[Capacity], context: int) -> str:
    """Return text: the fewest devices for the states, and for a document of ``context`` tokens."""
    held = [job for job, each in zip(jobs, fits, strict=True) if each.best is not None]
    if not held:
        return (
            f"fits on no layout of {_numbers(jobs)} devices; give more with --gpus, or a --device "
            "with more memory"
        )
    text = f"states fit from {held[0].devices} devices on"
    if not context:
        return text
    holding = [job for job, each in zip(jobs, fits, strict=True) if each.tokens >= context]
    if not holding:
        return f"{text}; a document of {context} tokens on none of {_numbers(jobs)}"
    return f"{text}; a document of {context} tokens from {holding[0].devices} on"


def _numbers(jobs: list[TunedJob]) -> str:
    return ", ".join(str(job.devices) for job in jobs)
