"""Configurations of a rank's stage modules, with the functions of Megatron's DDP for each."""

import copy
from typing import Any

PART_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func")


def config_of_part(config: Any, number: int) -> Any:
    """Return ``config`` with the DDP functions of the rank's stage module ``number``.

    With several stage modules, the trainer's configuration holds lists of these functions.
    """
    if not isinstance(config.no_sync_func, list):
        return config
    own = copy.copy(config)
    for name in PART_FUNCTIONS:
        if isinstance(functions := getattr(config, name), list):
            setattr(own, name, functions[number])
    return own
