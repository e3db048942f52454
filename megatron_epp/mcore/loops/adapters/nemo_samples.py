"""Former import path of frameworks.nemo_rl.slices."""

from megatron_epp.frameworks.nemo_rl.slices import *  # noqa: F403
