"""Peak memory of a plan's devices by category: states, activations, K/V, workspace."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Item, Plan
from megatron_epp.sim.exchange import WEIGHT_BYTES
from megatron_epp.sim.play import play

STATES = ("weights", "gradients", "optimizer")
# Category of each item of the rule table.
_OF_ITEM = {
    Item.ACTIVATIONS: "activations",
    Item.WEIGHT_INPUTS: "activations",
    Item.HEAD_INPUTS: "activations",
    Item.KV: "K/V",
    Item.KV_GRADIENTS: "K/V",
    Item.WORKSPACE: "workspace",
}
PARTS = (*STATES, *dict.fromkeys(_OF_ITEM.values()))


def states_parts(cost: Cost) -> list[dict[str, float]]:
    """Return the bytes of weights, gradients and optimizer states on a device, by name, per stage.

    ZeRO 1 is assumed. All bytes are 0 on CPUs, whose memory budget excludes model states.
    """
    resident = cost.layout.profile.states.zero1_resident
    of_weights = min(float(WEIGHT_BYTES), resident)
    result = []
    for every, *held in zip(cost.memory.states_bytes, *cost.memory.parameters, strict=True):
        weights = of_weights * float(sum(held))
        gradients = (resident - of_weights) * float(sum(held))
        parts = (weights, gradients, every - weights - gradients)
        result.append(dict(zip(STATES, parts, strict=True)))
    return result


def memory_parts(plan: Plan, cost: Cost) -> list[dict[str, float]]:
    """Return, for every rank, the bytes of each category of ``PARTS`` at the rank's memory peak.

    The bytes of a rank add up to the peak. For each category, the plan is simulated again with
    unchanged op times, and with only the bytes of this category.
    """
    cost = cost.with_vocabulary(plan.vocabulary_parallel)
    table = cost.table(plan)
    played = play(plan, table)
    peaks = played.run.op_peak
    ends = np.cumsum([len(order) for order in plan.rank_orders])
    first = [0, *ends[:-1].tolist()]
    at = [begin + int(peaks[begin:end].argmax()) for begin, end in zip(first, ends, strict=True)]
    ranks: list[dict[str, float]] = [dict.fromkeys(PARTS, 0.0) for _ in at]
    for stage, parts in enumerate(states_parts(cost)):
        for name, held in parts.items():
            ranks[plan.rank_of[stage]][name] += held
    nothing = tuple(0.0 for _ in table.resident_bytes)
    for name in dict.fromkeys(_OF_ITEM.values()):
        own = dataclasses.replace(
            table,
            resident_bytes=nothing,
            held_bytes=_alone(table.held_bytes, name),
            workspace_bytes=table.workspace_bytes
            if _OF_ITEM[Item.WORKSPACE] == name
            else {kind: np.zeros_like(each) for kind, each in table.workspace_bytes.items()},
        )
        held_then = play(plan, own).run.op_peak
        for rank, op in enumerate(at):
            ranks[rank][name] = float(held_then[op])
    # a backward op frees saved activations while it runs, which makes the workspace negative
    for parts in ranks:
        parts["activations"] += min(parts["workspace"], 0.0)
        parts["workspace"] = max(parts["workspace"], 0.0)
    return ranks


def _alone(held: Mapping, name: str) -> dict:
    return {
        item: np.asarray(each, np.float64) * (_OF_ITEM[item] == name) for item, each in held.items()
    }
