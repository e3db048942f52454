"""Former import path of frameworks.slime.slices."""

from megatron_epp.frameworks.slime.slices import *  # noqa: F403
