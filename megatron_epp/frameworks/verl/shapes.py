"""Shapes of verl's micro-batches: TensorDicts of nested tokens that become THD or BSHD rows.

The rules are those of ``verl/models/mcore/util.py`` (preprocess_thd_engine,
preprocess_bshd_engine).
"""

import math
from typing import Any

from megatron_epp.frameworks.caller import Caller, Reader
from megatron_epp.frameworks.rows import beside, in_a_row, multiple_of
from megatron_epp.planner.calls.microbatch import MicrobatchShape

RELIES_ON = (
    "verl.models.mcore.util._compute_fp8_thd_align_size",
    "verl.models.mcore.util.preprocess_bshd_engine",
    "verl.models.mcore.util.preprocess_thd_engine",
    "verl.utils.seqlen_balancing.rearrange_micro_batches",
    "verl.workers.engine.megatron.transformer_impl.MegatronEngine.forward_backward_batch",
)


def verl_reader(caller: Caller) -> Reader | None:
    """Return a function from verl's micro-batch to its shape; None if the layout is unknown."""
    settings = getattr(caller.brings("self"), "engine_config", None)
    if settings is None or getattr(settings, "dynamic_context_parallel", False):
        return None  # ranks of one pipeline have different micro-batches
    if getattr(caller.config, "experimental_attention_variant", None) == "dsv4_hybrid":
        return None  # one contiguous part per rank, of at least a window of rows
    quantised = getattr(caller.config, "fp8", None) in ("e4m3", "hybrid")

    def packed(micro_batch: Any) -> MicrobatchShape | None:
        each, total_multiple = caller.aligned, 1
        if quantised:
            each, total_multiple = math.lcm(16, each), each * 128
        if getattr(settings, "pad_to_length", False):
            total_multiple = math.lcm(total_multiple, settings.pad_to_length_bucket, caller.cp)
        return in_a_row(_lengths(micro_batch), each, total_multiple)

    def padded(micro_batch: Any) -> MicrobatchShape | None:
        lengths, forced = _lengths(micro_batch), micro_batch.get("forced_max_seqlen", None)
        longest = max(lengths) if forced is None else int(getattr(forced, "data", forced))
        rows = multiple_of(longest, caller.aligned)
        if quantised:
            total_multiple = 128 * caller.tp * caller.cp
            rows = multiple_of(
                rows,
                math.lcm(total_multiple // math.gcd(len(lengths), total_multiple), caller.aligned),
            )
        return beside(lengths, rows)

    return packed if getattr(settings, "use_remove_padding", True) else padded


def _lengths(micro_batch: Any) -> list[int]:
    return micro_batch["input_ids"].offsets().diff().tolist()
