"""Lower bounds on an iteration's time, so that every plan can say how far from perfect it is."""

from collections.abc import Sequence

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import Kind


def batch_seconds(cost: Cost, lengths: Sequence[int], forward_only: bool = False) -> float:
    """No plan for documents of these ``lengths`` is faster, however they are cut and ordered.

    The busiest stage computes all tokens and pairs in at least one chunk. Neither bubbles nor
    recompute nor communication are counted, nor more than one chunk's constants.
    """
    lengths_D = np.array(lengths, np.float64)
    whole = np.array([lengths_D.sum(), (lengths_D * (lengths_D + 1) / 2).sum(), 1.0])
    seconds = _compute_per(cost, Kind.FORWARD) @ whole
    if not forward_only:
        halves = _compute_per(cost, Kind.INPUT) + _compute_per(cost, Kind.WEIGHT)
        seconds += np.minimum(_compute_per(cost, Kind.BACKWARD) @ whole, halves @ whole)
    return float(seconds.max())


def chunked_seconds(cost: Cost, loads: Loads, split_backward: bool = False) -> float:
    """No order of these chunks is faster.

    Stage s cannot begin before the quickest chunk has come through the stages in front of it
    (ramp), works through every chunk, and after its last backward that chunk's gradient still
    has to run back to stage 0 (tail). With the backward split, W may run meanwhile.
    Communication inside ops and messages between stages count, recompute does not.
    """
    backward = Kind.INPUT if split_backward else Kind.BACKWARD
    forward_SC = cost.seconds(Kind.FORWARD, loads)
    backward_SC = cost.seconds(backward, loads)
    link_C = cost.link_seconds(loads) + cost.profile.link_latency_seconds
    bound = 0.0
    for stage in range(cost.stages):
        hops_C = stage * link_C
        ramp = float((forward_SC[:stage].sum(axis=0) + hops_C).min())
        tail = float((backward_SC[:stage].sum(axis=0) + hops_C).min())
        work = float((forward_SC[stage] + backward_SC[stage]).sum())
        bound = max(bound, ramp + work + tail)
        if split_backward:
            weight = float(cost.seconds(Kind.WEIGHT, loads)[stage].sum())
            bound = max(bound, ramp + work + weight)
    return bound


def _compute_per(cost: Cost, kind: Kind) -> np.ndarray:
    """[stages, 3]: computation alone."""
    return cost.seconds_per(kind) - cost.comm_seconds_per(kind)
