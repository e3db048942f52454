"""Layers per stage where the user left them open: as even in time as whole layers allow."""

import dataclasses

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Kind


def balanced(cost: Cost, lengths: np.ndarray, chunks: float) -> Cost:
    """``cost`` with layers moved from the slowest stage to the fastest while that helps.

    The last stage carries the output layer, the first the embedding. ``chunks`` is about how many
    there will be: each pays its constants.
    """
    whole = cost.whole_features(lengths, chunks)

    def seconds(of: Cost) -> np.ndarray:
        return (of.seconds_per(Kind.FORWARD) + of.seconds_per(Kind.BACKWARD)) @ whole

    while True:
        taken = seconds(cost)
        slow, fast = int(taken.argmax()), int(taken.argmin())
        layers = list(cost.layers)
        layers[slow] -= 1
        layers[fast] += 1
        if layers[slow] < 1:
            return cost
        moved = dataclasses.replace(cost, layers=tuple(layers))
        if seconds(moved).max() >= taken.max() * (1 - 1e-9):
            return cost
        if any(s >= b for s, b in zip(moved.states_bytes, moved.budget_bytes, strict=True)):
            return cost
        cost = moved
