"""Breaks what fp8 needs of an elastic pipeline on purpose, another way in every batch.

Run inside a rank (``Trial.interfere``), as tests/mcore/sabotage.py.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
from megatron.core import fp8_utils

from megatron_epp.mcore.data.row_share import RowShare
from megatron_epp.mcore.trainer import stage_runner


def keep_the_weights_of_another_batch() -> AbstractContextManager:
    """What an iteration has quantised is what the next one multiplies by."""
    return patch.object(stage_runner, "forget_quantised_weights", lambda model: None)


def scale_whole_tensors() -> AbstractContextManager:
    """What is computed together is first rounded by one scale, with which its largest number is the
    format's."""
    quantizers = sys.modules["megatron_epp.te_reference.fp8.quantizers"]
    plain = quantizers._scaled

    def scaled(kernel, x_TK, layout, dtype):
        scale = x_TK.abs().amax().clamp(min=1e-30) / torch.finfo(dtype).max
        return plain(kernel, (x_TK / scale).float().to(dtype).double() * scale, layout, dtype)

    return patch.object(quantizers, "_scaled", scaled)


def recompute_in_full_digits() -> AbstractContextManager:
    """What backward computes again is not quantised: it runs outside of Megatron's block."""
    return patch.object(fp8_utils, "get_fp8_context", lambda config, layer: nullcontext())


def leave_rows_unpadded() -> AbstractContextManager:
    """Chunks have the rows of their tokens."""
    return patch.object(RowShare, "multiple", property(lambda self: self.parts * self.splits))


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    keep_the_weights_of_another_batch,
    scale_whole_tensors,
    recompute_in_full_digits,
    nullcontext,
    leave_rows_unpadded,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number % len(WAYS)]()
