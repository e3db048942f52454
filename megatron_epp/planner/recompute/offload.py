"""How many layers can lie in the host's memory at no cost in time."""

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import BACKWARDS, OFFLOAD, Kind
from megatron_epp.planner.order.problem import Counts


def hidden_layers(cost: Cost, loads: Loads) -> np.ndarray:
    """[stages, chunks]: the most layers whose copies hide behind F, and behind B and I alike.

    Where it is only one or two, all of them are on the device while their chunk's ops run
    (cost.cost.IN_FLIGHT), and gone while other chunks' do.
    """
    kinds = (Kind.FORWARD, *BACKWARDS)
    seconds = np.min([cost.seconds(kind, loads) for kind in kinds], axis=0)
    layers = np.array(cost.layers, dtype=np.float64)[:, None]
    return np.minimum(np.floor(seconds / cost.copy_seconds(loads)), layers)


def without_offload(counts: Counts) -> Counts:
    return {letter: grid for letter, grid in counts.items() if letter != OFFLOAD}


def offload_of(counts: Counts) -> Counts:
    return {letter: grid for letter, grid in counts.items() if letter == OFFLOAD}
