"""AReaL: MicroBatchItems, whose documents are padded before they are drawn.

``areal/engine/megatron_engine.py``. Trees of prefixes and pictures are laid out by the model.
"""

from typing import Any

from megatron_epp.frameworks.caller import Caller, Reader
from megatron_epp.frameworks.rows import lengths_between
from megatron_epp.planner.calls.microbatch import MicrobatchShape


def areal_reader(caller: Caller) -> Reader | None:
    def read(micro_batch: Any) -> MicrobatchShape | None:
        boundaries = micro_batch.padded_mb.get("cu_seqlens")
        if boundaries is None or "pixel_values" in micro_batch.padded_mb:
            return None
        return MicrobatchShape(int(boundaries[-1]), 1, lengths_between(boundaries))

    return read
