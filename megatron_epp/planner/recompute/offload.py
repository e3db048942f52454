"""How many layers can lie in the host's memory at no cost in time."""

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import Choice, Counts, split_choice
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import BACKWARDS, OFFLOAD, Kind
from megatron_epp.planner.order.problem import choice_of


def hidden_layers(cost: Cost, loads: Loads) -> dict[Choice, np.ndarray]:
    """[stages, chunks]: the most layers whose copies hide behind F, and behind B and I alike. Those
    of the first kind first: a byte takes as long to copy whichever layer saved it.

    Where it is only one or two, all of them are on the device while their chunk's ops run
    (cost.cost.IN_FLIGHT), and gone while other chunks' do.
    """
    kinds = (Kind.FORWARD, *BACKWARDS)
    seconds = np.min([cost.seconds(kind, loads) for kind in kinds], axis=0)
    aside: dict[Choice, np.ndarray] = {}
    for kind, layers in enumerate(cost.kinds.counts):
        copy = cost.copy_seconds(loads, kind)
        grid = np.minimum(np.floor(seconds / copy), layers[:, None])
        aside[choice_of(cost, kind, OFFLOAD)] = grid
        seconds = seconds - grid * copy
    return aside


def without_offload(counts: Counts) -> Counts:
    return {choice: grid for choice, grid in counts.items() if split_choice(choice)[1] != OFFLOAD}


def offload_of(counts: Counts) -> Counts:
    return {choice: grid for choice, grid in counts.items() if split_choice(choice)[1] == OFFLOAD}
