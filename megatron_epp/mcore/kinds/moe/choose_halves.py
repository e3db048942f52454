"""Number of tokens from which experts process a chunk in two halves of rows (halves.py)."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron_epp.layers.moe.weight_stack import stacks_of
from megatron_epp.mcore.kinds.base import ChosenBy
from megatron_epp.mcore.kinds.moe.halves import set_halved_from
from megatron_epp.mcore.kinds.moe.limits import expert_ranks, has_experts, obstacle_to_halves
from megatron_epp.mcore.kinds.moe.router import halve_experts, moe_layers
from megatron_epp.runtime.consensus import largest

# Tokens of the timed chunk, relative to the number from which halves are faster by the cost model.
MARGIN = 4


def choose_halves(models: Sequence[Any], chosen_by: ChosenBy) -> str:
    """Choose the number of tokens from which chunks run in halves; return the line to log.

    All ranks of the job must call this function. The number follows from the analytic cost model,
    so that a resumed job has the same number. On GPUs, each rank times its first MoE layer with and
    without halves; unless halves are faster on the slowest rank, all chunks stay whole. The line is
    "" without MoE, or if the experts of a layer are not sharded.
    """
    args, seconds, group = chosen_by.args, chosen_by.seconds, chosen_by.group
    if not has_experts(args) or expert_ranks(args) == 1:
        return ""
    layers = [(model, at, layer) for model in models for at, layer in moe_layers(model)]
    apart, least = float(not all(stacks_of(layer) for *_, layer in layers)), math.inf
    if (reason := obstacle_to_halves(args)) is None:
        least = chosen_by.cost().seconds.halved_from
    apart, least = largest([apart, least], group)
    if apart:
        reason, least = reason or "a product for each expert", math.inf
    timed = ""
    if seconds is not None and (tokens := timed_tokens(least, args.seq_length)):
        own = [0.0, 0.0]
        if layers:
            model, at, layer = layers[0]
            paths = [partial(set_halved_from, layer, start) for start in (math.inf, 0)]
            own = seconds(model, at, paths, tokens)
        undivided, halves = largest(own, group)
        timed = f"{1e3 * halves:.2f} ms a layer of {tokens} tokens, whole {1e3 * undivided:.2f} ms"
        if halves >= undivided:
            reason, least = f"the time of halves ({timed})", math.inf
    halve_experts(models, least)
    if least == math.inf:
        return f"experts: chunks stay whole, because of {reason or 'fast exchanges'}"
    more = f" ({timed})" if timed else ""
    return f"experts: chunks of {least:.0f} tokens or more in two halves of rows{more}"


def timed_tokens(least: float, context: int) -> int:
    """Return the tokens of the chunk to time; 0 if no chunk of ``context`` tokens is halved."""
    return 0 if least > context else max(1, int(min(MARGIN * least, context)))
