"""Shapes of SkyRL's micro-batches: mappings with sequences [B, S] and their mask.

SkyRL's wrapper removes the padding. Its rules are in ``distributed/megatron/megatron_utils.py``
(preprocess_packed_seqs, remove_left_padding) and, from release 0.4.0 on, in ``packing_utils.py``.
"""

import math
from typing import Any

from megatron_epp.frameworks.caller import Caller, Reader, installed_release
from megatron_epp.frameworks.rows import beside, in_a_row, kept, multiple_of
from megatron_epp.planner.calls.microbatch import MicrobatchShape

_MEGATRON = "skyrl.backends.skyrl_train"
RELIES_ON = (
    f"{_MEGATRON}.distributed.megatron.megatron_utils.preprocess_packed_seqs",
    f"{_MEGATRON}.distributed.megatron.megatron_utils.remove_left_padding",
    f"{_MEGATRON}.distributed.megatron.packing_utils._fp8_token_align",
    f"{_MEGATRON}.distributed.megatron.packing_utils.get_packed_seq_align_size",
    f"{_MEGATRON}.distributed.megatron.packing_utils.get_unpacked_seq_align_size",
    f"{_MEGATRON}.distributed.megatron.quantization_utils.is_mxfp8_recipe",
    f"{_MEGATRON}.workers.megatron.megatron_model_wrapper.MegatronModelWrapper.forward",
    f"{_MEGATRON}.workers.megatron.megatron_model_wrapper.MegatronModelWrapper"
    ".forward_backward_mini_batch",
)


def skyrl_reader(caller: Caller) -> Reader | None:
    """Return a function from SkyRL's micro-batch to its shape; None if padding is unknown."""
    wrapper = caller.brings("self")
    if wrapper is None:
        return None
    each = caller.aligned
    if caller.fp8:
        multiple = _fp8_multiple(caller)
        if multiple is None:
            return None
        each = math.lcm(each, multiple)
    packed = wrapper.remove_microbatch_padding

    def read(micro_batch: Any) -> MicrobatchShape | None:
        lengths = kept(micro_batch["attention_mask"])
        if not packed:
            return beside(lengths, multiple_of(max(lengths), each))
        parts = micro_batch.get("sub_seq_lengths")
        if parts is not None:
            lengths = [length for row in parts for length in row.tolist()]
        return in_a_row(lengths, each)

    return read


def _fp8_multiple(caller: Caller) -> int | None:
    """Return the multiple to which rows are padded in fp8; None if unknown (recipe ``auto``)."""
    if installed_release("skyrl") < (0, 4):
        return 16 * caller.cp
    recipe = getattr(caller.config, "fp8_recipe", None)
    recipe = str(getattr(recipe, "value", recipe)).strip().lower()
    if recipe == "auto":
        return None
    if recipe == "mxfp8":
        return 32 * caller.tp * caller.cp
    return (128 * caller.tp if caller.tp > 1 else 16) * caller.cp
