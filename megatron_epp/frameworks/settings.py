"""Settings that ``tune --for NAME`` prints: a job in the format of a framework."""

import dataclasses

from megatron_epp.frameworks.bridge.settings import bridge_settings
from megatron_epp.frameworks.slime.settings import slime_settings
from megatron_epp.frameworks.stock_settings import StockSettings, megatron_flags
from megatron_epp.frameworks.swift.settings import swift_settings
from megatron_epp.frameworks.verl.settings import verl_settings

SETTINGS = {
    "megatron": megatron_flags,
    "bridge": bridge_settings,
    "verl": verl_settings,
    "slime": slime_settings,
    "ms-swift": swift_settings,
}


def require_framework(name: str) -> None:
    """Raise a ValueError if ``tune --for`` does not support the framework ``name``."""
    if name not in SETTINGS:
        raise ValueError(f"--for {name}: expected one of {', '.join(SETTINGS)}")


def settings_of(framework: str, job: StockSettings) -> list[str]:
    """Return ``job`` as lines for ``framework``: flags, overrides, or fields of a recipe.

    Raises:
        ValueError: The framework has no settings for the layers of the job's stages.
    """
    unit = 2 * job.layout.cp * job.layout.tp  # every rank has two parts of a document
    job = dataclasses.replace(job, tokens=-(-job.tokens // unit) * unit)
    return list(SETTINGS[framework](job))
