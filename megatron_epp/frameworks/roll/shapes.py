"""Shapes of ROLL's micro-batches: DataProtos or mappings with padded samples.

The rules are those of ``roll/distributed/strategy/megatron_strategy.py`` (_pack_sequences).
"""

import math
from collections.abc import Mapping
from typing import Any

from megatron_epp.frameworks.caller import Caller, Reader
from megatron_epp.frameworks.rows import beside, in_a_row, kept
from megatron_epp.planner.calls.microbatch import MicrobatchShape

_STRATEGY = "roll.distributed.strategy.megatron_strategy.MegatronInferStrategy"
RELIES_ON = tuple(
    f"{_STRATEGY}.{name}" for name in ("_get_pad_factor", "_pack_sequences", "inner_forward_step")
)


def roll_reader(caller: Caller) -> Reader | None:
    """Return a function that computes the shape of ROLL's micro-batches."""
    packed = getattr(caller.brings("self"), "use_sequence_packing", False)
    each = math.lcm(16, caller.aligned)

    def read(micro_batch: Any) -> MicrobatchShape | None:
        tensors = micro_batch if isinstance(micro_batch, Mapping) else micro_batch.batch
        samples, rows = tensors["input_ids"].shape
        mask = tensors.get("attention_mask")
        if mask is None or mask.dim() != 2:
            return MicrobatchShape(rows, samples)
        return in_a_row(kept(mask), each) if packed else beside(kept(mask), rows)

    return read
