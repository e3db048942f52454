"""Former import path of frameworks.verl.slices."""

from megatron_epp.frameworks.verl.slices import *  # noqa: F403
