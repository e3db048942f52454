"""Former import path of frameworks.swift.slices."""

from megatron_epp.frameworks.swift.slices import *  # noqa: F403
