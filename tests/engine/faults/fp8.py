"""Faults of what fp8 needs of an elastic pipeline."""

import sys
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
from megatron.core import fp8_utils

from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.mcore.trainer import stage_runner
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def one_scale(scaled, kernel, x_TK, layout, dtype):
    scale = x_TK.abs().amax().clamp(min=1e-30) / torch.finfo(dtype).max
    return scaled(kernel, (x_TK / scale).float().to(dtype).double() * scale, layout, dtype)


def scale_whole_tensors() -> AbstractContextManager:
    """What is computed together is first rounded by one scale, with which its largest number is the
    format's."""
    return fault(sys.modules["tests.engine.fp8.quantizers"], "_scaled", one_scale)()


def leave_rows_unpadded() -> AbstractContextManager:
    """Chunks have the rows of their tokens."""
    return patch.object(RowShard, "multiple", property(lambda self: self.parts * self.splits))


FAULTS: Faults = {
    "nothing": nothing,
    # What an iteration has quantised is what the next one multiplies by.
    "keep the weights of another batch": fault(
        stage_runner, "forget_quantised_weights", lambda forget_quantised_weights, model: None
    ),
    "scale whole tensors": scale_whole_tensors,
    # What backward computes again is not quantised: it runs outside of Megatron's block.
    "recompute in full digits": fault(
        fp8_utils, "get_fp8_context", lambda get_fp8_context, config, layer: nullcontext()
    ),
    "nothing again": nothing,
    "leave rows unpadded": leave_rows_unpadded,
}
around = in_turn(FAULTS)
