"""``tune --for NAME``: a choice in the words of a framework, by its name."""

import dataclasses

from megatron_epp.frameworks.bridge import settings as bridge
from megatron_epp.frameworks.slime import settings as slime
from megatron_epp.frameworks.stock_settings import StockSettings, megatron_flags
from megatron_epp.frameworks.swift import settings as swift
from megatron_epp.frameworks.verl import settings as verl

SETTINGS = {
    "megatron": megatron_flags,
    "bridge": bridge.settings,
    "verl": verl.settings,
    "slime": slime.settings,
    "ms-swift": swift.settings,
}


def require_framework(name: str) -> None:
    """Raise ValueError if ``name`` is not known."""
    if name not in SETTINGS:
        raise ValueError(f"--for {name}: expected one of {', '.join(SETTINGS)}")


def settings_of(framework: str, job: StockSettings) -> list[str]:
    """Lines for ``framework``: flags, overrides, or a recipe's fields.

    ValueError: it cannot say them.
    """
    unit = 2 * job.layout.cp * job.layout.tp  # every rank has two parts of a document
    job = dataclasses.replace(job, tokens=-(-job.tokens // unit) * unit)
    return list(SETTINGS[framework](job))
