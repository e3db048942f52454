"""Errors of the analytic cost model on public measurements, by device, for ``plan`` and others.

``scripts/bench/public.py --write`` computes ``accuracy.json``: by device and class of measurement,
the median and the largest error as fractions, and the number of measurements.
"""

import json
from functools import cache
from pathlib import Path

from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.profile import ANALYTIC, Profile

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


def accuracy_lines(profile: Profile) -> list[str]:
    """Return a line on the model's accuracy for the device of an analytic ``profile``.

    The list is empty for a measured profile, and for a device that is not in the catalogue.
    """
    device = profile.provenance.device
    if profile.provenance.kind != ANALYTIC or device not in DEVICES:
        return []
    parts: list[str] = []
    for name, (median, worst, count) in accuracy().get(device, {}).items():
        between = " and " if parts else ", worst "
        start = "" if parts else "median "
        parts.append(f"{start}{median:.0%}{between}{worst:.0%} of {count} {_WORDS[name]}")
    return [f"analytic model of {device}: {'; '.join(parts) or 'no public measurement scores it'}"]
