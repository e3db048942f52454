"""Shapes of ms-swift's micro-batches: mappings with padded input_ids [1, T] or [B, S].

A packed document begins where a position is 0 (``swift/megatron/trainers/utils.py``,
prepare_batch).
"""

from typing import Any

import torch

from megatron_epp.frameworks.caller import Caller, Reader
from megatron_epp.frameworks.rows import lengths_between
from megatron_epp.planner.calls.microbatch import MicrobatchShape

RELIES_ON = (
    "swift.megatron.trainers.utils.get_batch_on_this_pp_rank",
    "swift.megatron.trainers.utils.prepare_batch",
    "swift.utils.transformers_utils.get_packed_seq_params",
)


def swift_reader(caller: Caller) -> Reader | None:
    """Return a function that computes the shape of ms-swift's micro-batches."""

    def read(micro_batch: Any) -> MicrobatchShape | None:
        samples, rows = micro_batch["input_ids"].shape
        positions = micro_batch.get("text_position_ids")
        positions = micro_batch.get("position_ids") if positions is None else positions
        trainer = caller.brings("self")
        in_row = getattr(getattr(trainer, "args", None), "padding_free", samples == 1)
        if not in_row or positions is None or positions.dim() != 2:
            return MicrobatchShape(rows, samples)
        starts = (positions.flatten() == 0).nonzero().flatten().tolist()
        return MicrobatchShape(rows * samples, 1, lengths_between(torch.tensor([*starts, rows])))

    return read
