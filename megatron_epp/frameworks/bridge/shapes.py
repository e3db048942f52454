"""Shapes of Megatron-Bridge's micro-batches: mappings of tokens [B, S] and document boundaries.

``megatron/bridge/training/gpt_step.py`` uses two names for the boundaries. The array with the older
name, ``cu_seqlens``, is padded with -1.
"""

from typing import Any

from megatron_epp.frameworks.caller import Caller, Reader
from megatron_epp.frameworks.rows import lengths_between
from megatron_epp.planner.calls.microbatch import MicrobatchShape

RELIES_ON = (
    "megatron.bridge.training.gpt_step.forward_step",
    "megatron.bridge.training.gpt_step.get_batch",
    "megatron.bridge.training.gpt_step.get_batch_from_iterator",
    "megatron.bridge.training.utils.packed_seq_utils._as_python_int",
    "megatron.bridge.training.utils.packed_seq_utils._squeeze_metadata",
    "megatron.bridge.training.utils.packed_seq_utils.get_packed_seq_params",
)


def bridge_reader(caller: Caller) -> Reader | None:
    """Return a function that computes the shape of Megatron-Bridge's micro-batches."""

    def read(micro_batch: Any) -> MicrobatchShape | None:
        samples, rows = micro_batch["tokens"].shape
        boundaries = micro_batch.get("cu_seqlens_q")
        boundaries = micro_batch.get("cu_seqlens") if boundaries is None else boundaries
        if boundaries is None:
            return MicrobatchShape(rows, samples)
        return MicrobatchShape(rows * samples, 1, lengths_between(boundaries))

    return read
