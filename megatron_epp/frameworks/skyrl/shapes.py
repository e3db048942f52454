"""SkyRL: mappings with sequences [B, S] and their mask, whose padding its wrapper removes.

Rules of ``distributed/megatron/megatron_utils.py`` (preprocess_packed_seqs, remove_left_padding).
"""

import math
from typing import Any

from megatron_epp.frameworks.caller import Caller, Reader
from megatron_epp.frameworks.rows import beside, in_a_row, kept, multiple_of
from megatron_epp.planner.calls.microbatch import MicrobatchShape


def skyrl_reader(caller: Caller) -> Reader | None:
    wrapper = caller.brings("self")
    if wrapper is None:
        return None
    each = math.lcm(caller.aligned, 16 * caller.cp) if caller.fp8 else caller.aligned
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
