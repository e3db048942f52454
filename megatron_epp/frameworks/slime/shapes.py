"""Shapes of slime's and miles's micro-batches: lists of tokens that become THD or BSHD rows.

The rules are those of ``slime/backends/megatron_utils/data.py`` and
``miles/backends/training_utils/data.py`` (get_batch).
"""

from typing import Any

from megatron_epp.frameworks.caller import Caller, Reader
from megatron_epp.frameworks.rows import beside, in_a_row, multiple_of
from megatron_epp.planner.calls.microbatch import MicrobatchShape

RELIES_ON = (
    "slime.backends.megatron_utils.cp_utils.slice_with_cp",
    "slime.backends.megatron_utils.data.DataIterator",
    "slime.backends.megatron_utils.data.get_batch",
    "miles.backends.training_utils.cp_utils.slice_with_cp",
    "miles.backends.training_utils.data.DataIterator",
    "miles.backends.training_utils.data.get_batch",
)


def slime_reader(caller: Caller) -> Reader | None:
    """Return a function from a micro-batch to its shape; None if slime's args are unknown."""
    args = caller.brings("args")
    if args is None:
        return None
    parts = 2 * caller.cp if caller.cp > 1 else 1
    total_multiple = caller.cp * caller.tp * args.data_pad_size_multiplier
    gathered = getattr(args, "allgather_cp", False)
    side_by_side = getattr(args, "qkv_format", "thd") == "bshd"

    def read(micro_batch: Any) -> MicrobatchShape | None:
        drawn = micro_batch.get_next(["tokens", "max_seq_lens"])
        lengths = [len(tokens) for tokens in drawn["tokens"]]
        if side_by_side:
            longest = int(drawn["max_seq_lens"][0])
            return beside(lengths, longest if gathered else multiple_of(longest, parts))
        return in_a_row(lengths, 1 if gathered else parts, total_multiple)

    return read
