"""What the fork server for training runs imports (forks.py), and what all of them would read alike.

It takes every rank 2 s of a core, and 4 s where it saves: a tokenizer of any kind has Megatron
import transformers, the help of its flags is read from its source three times, and numba loads what
it has compiled.
"""

import gc
import queue
from argparse import ArgumentParser
from functools import cache
from typing import Any
from unittest.mock import patch

from megatron_epp.mcore.patching import preloaded  # noqa: F401  # first: it keeps GPUs out

# isort: split
import megatron.core.tokenizers.text.text_tokenizer  # noqa: F401
import numpy.ma  # noqa: F401
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training import argument_utils, arguments

import megatron_epp.mcore.certify.rank
import megatron_epp.mcore.certify.reference
import megatron_epp.mcore.trainer.setup  # noqa: F401
from megatron_epp.cli import check, compare, draw, plan  # noqa: F401
from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.mcore.calibrate import probe
from megatron_epp.planner.options import Options
from megatron_epp.planner.replicas import plan_step

_GROUPS = argument_utils.ArgumentGroupFactory
_read = _GROUPS._get_field_docstrings


@cache
def _docstrings(kind: type) -> dict[str, str]:
    return _read(object.__new__(_GROUPS), kind)


def _read_once(self: Any, kind: type) -> dict[str, str]:
    return dict(_docstrings(kind))


_GROUPS._get_field_docstrings = _read_once
arguments.add_megatron_arguments(ArgumentParser())

# Loads the planners' compiled loops. Packing: the solver's threads would not survive a fork.
_COST = Cost(StageLayout(profile(MODELS["gpt-7b"], DEVICES["a100-80g"]), (16, 16)), (1e12, 1e12))
plan_step([900, 70], _COST, Options(context=4096), "packing", 1)

# For the list of what a save has written, which only --async-save shares, Megatron starts a process
# that imports the trainer: 2 s of a core for every rank.
filesystem_async._results_queue = queue.Queue()

# A calibration empties the caches before every op that it times, a third of its time; whoever
# measures in earnest starts afresh.
patch.object(probe, "_CACHE_BYTES", 0).start()

gc.collect()
gc.freeze()  # what is here stays, and need not be looked through in every process
