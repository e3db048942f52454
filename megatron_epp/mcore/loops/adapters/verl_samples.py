"""Import path of before of frameworks.verl.slices."""

from megatron_epp.frameworks.verl.slices import *  # noqa: F403
