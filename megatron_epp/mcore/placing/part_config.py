"""Megatron's configuration for each stage module of a rank, with the functions of its own DDP."""

import copy
from typing import Any

PART_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func")


def config_of_part(config: Any, number: int) -> Any:
    """Return ``config`` with the DDP functions of the rank's stage module ``number``.

    If a rank has several stage modules, ``config`` contains lists with a function of each module.
    """
    if not isinstance(config.no_sync_func, list):
        return config
    own = copy.copy(config)
    for name in PART_FUNCTIONS:
        if isinstance(functions := getattr(config, name), list):
            setattr(own, name, functions[number])
    return own
