"""Errors of the analytic cost model on public measurements, by device.

``scripts/bench/public.py --write`` computes ``accuracy.json``. It contains, by device and class of
measurement, the median and the largest error as fractions, and the number of measurements.
"""

import json
import math
from functools import cache
from pathlib import Path

from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import ANALYTIC

ACCURACY = Path(__file__).with_name("accuracy.json")
_WORDS = {
    "dense": "public measurements of dense models",
    "MoE": "public measurements of MoE",
    "memory": "of memory",
}

# By class of measurement: median error, largest error, number of measurements.
Errors = dict[str, tuple[float, float, int]]


@cache
def accuracy() -> dict[str, Errors]:
    """Return the errors of every device that public measurements score."""
    return json.loads(ACCURACY.read_text(encoding="utf-8"))


def accuracy_lines(cost: Cost) -> list[str]:
    """Return lines of text on the accuracy of an analytic ``cost`` for its device.

    If experts compute large chunks in two halves (cost/halves.py), a second line names the minimum
    number of tokens of these chunks. The list is empty for a measured profile, and for a device
    that is not in the catalogue.
    """
    origin, least = cost.layout.profile.provenance, cost.seconds.halved_from
    device = origin.device
    if origin.kind != ANALYTIC or device not in DEVICES:
        return []
    parts: list[str] = []
    for name, (median, worst, count) in accuracy().get(device, {}).items():
        between = " and " if parts else ", worst "
        start = "" if parts else "median "
        parts.append(f"{start}{median:.0%}{between}{worst:.0%} of {count} {_WORDS[name]}")
    halves = (
        f"experts of --epp: chunks of {least:,.0f} tokens or more in two halves of rows; how much "
        "this hides of their exchanges is an estimate, which no GPU has measured"
    )
    return [
        f"analytic model of {device}: {'; '.join(parts) or 'no public measurement scores it'}",
        *[halves] * math.isfinite(least),
    ]
