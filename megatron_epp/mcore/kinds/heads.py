"""Number of key and value heads in Megatron's flags."""

from typing import Any


def query_groups(args: Any) -> int:
    """Return the number of key and value heads in Megatron's ``args``.

    Without --group-query-attention, Megatron ignores --num-query-groups, whose default is 1.
    """
    if not getattr(args, "group_query_attention", True):
        return args.num_attention_heads
    return args.num_query_groups or args.num_attention_heads
