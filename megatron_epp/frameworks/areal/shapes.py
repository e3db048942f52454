"""Shapes of AReaL's micro-batches: MicroBatchItems, whose documents are already padded.

See ``areal/engine/megatron_engine.py``. For prefix trees and images, the layout depends on the
model and is unknown here. Layers without support for packed documents (``use_padded_seq``) get
one row of tokens per document.
"""

from typing import Any

import torch

from megatron_epp.frameworks.caller import Caller, Reader
from megatron_epp.frameworks.rows import beside, lengths_between
from megatron_epp.planner.calls.microbatch import MicrobatchShape

RELIES_ON = (
    "areal.engine.megatron_engine.MegatronEngine._prepare_mb_list",
    "areal.engine.megatron_engine.MegatronEngine.forward_backward_batch",
    "areal.engine.megatron_utils.packed_context_parallel.packed_context_parallel_forward",
    "areal.engine.megatron_utils.packed_context_parallel.preprocess_packed_seqs_context_parallel",
    "areal.utils.data.MicroBatchItem",
    "areal.utils.data.pack_tensor_dict",
    "areal.utils.data.pad_packed_tensor_dict",
    "areal.utils.math.align",
    "areal.utils.math.ceil_div",
)


def areal_reader(caller: Caller) -> Reader | None:
    """Return a function that computes the shape of AReaL's micro-batches."""
    side_by_side = getattr(caller.brings("self"), "use_padded_seq", False)

    def read(micro_batch: Any) -> MicrobatchShape | None:
        boundaries = micro_batch.padded_mb.get("cu_seqlens")
        if boundaries is None or "pixel_values" in micro_batch.padded_mb:
            return None
        if side_by_side:
            samples = torch.as_tensor(boundaries).diff().tolist()
            return beside(samples, max(samples))
        return MicrobatchShape(int(boundaries[-1]), 1, lengths_between(boundaries))

    return read
