"""Numbers of key and value heads in Megatron's flags."""

from typing import Any


def query_groups(args: Any) -> int:
    """Return the number of key and value heads in Megatron's ``args``.

    --num-query-groups is 1 by default, and Megatron reads it with --group-query-attention only.
    """
    if not getattr(args, "group_query_attention", True):
        return args.num_attention_heads
    return args.num_query_groups or args.num_attention_heads
