"""Layers of experts, scaled down.

Kept: groups of experts and how many a token may reach, experts per rank
of expert parallelism at least two where the model has them, shared experts, how an expert's width
and the shared experts' compare with the hidden size. Scaled down: experts (to 8, or twice what a
token chooses), experts of a token (to 4), widths.
"""

from argparse import Namespace
from math import lcm
from typing import Any

from megatron_epp.mcore.refusals import require_whole_experts

EXPERTS = 8
MOST_CHOSEN = 4
MOST_GROUPS = 4


def small_experts(args: Namespace, hidden: int, tp: int) -> dict[str, Any]:
    """The values that make experts of Megatron's parsed ``args`` small. ValueError: one line."""
    if not args.num_experts:
        return {}
    require_whole_experts(args)
    ranks, chosen = args.expert_model_parallel_size, args.moe_router_topk
    changed: dict[str, Any] = {}
    if args.moe_router_num_groups:
        groups = min(args.moe_router_num_groups, MOST_GROUPS)
        reached = args.moe_router_group_topk or 1
        of_group = max(1, min(2, chosen // reached))  # of a token, in each group that it reaches
        reached = max(1, min(reached, groups // 2))
        chosen = reached * of_group
        changed |= {"moe_router_num_groups": groups, "moe_router_group_topk": reached}
        step, least = lcm(groups, ranks), groups * (of_group + 2)
    else:
        chosen = min(chosen, MOST_CHOSEN)
        step, least = ranks, 2 * chosen
    experts = -(-max(least, EXPERTS) // step) * step
    changed |= {"num_experts": min(experts, args.num_experts), "moe_router_topk": chosen}
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        if getattr(args, name):
            share = min(getattr(args, name) / args.hidden_size, 4.0)
            changed[name] = max(1, round(share * hidden / (8 * tp))) * 8 * tp
    return changed
