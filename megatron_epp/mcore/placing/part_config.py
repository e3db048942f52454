"""Configurations of a rank's parts of the model, with what Megatron's DDP does for each."""

import copy
from typing import Any

PART_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func")


def config_of_part(config: Any, number: int) -> Any:
    """``config`` with what Megatron's DDP does for part ``number`` of a rank's: of several parts
    the trainer keeps a list."""
    if not isinstance(config.no_sync_func, list):
        return config
    own = copy.copy(config)
    for name in PART_FUNCTIONS:
        if isinstance(functions := getattr(config, name), list):
            setattr(own, name, functions[number])
    return own
