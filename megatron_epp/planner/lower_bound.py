"""Bounds below which no plan can come: for a batch, whatever its chunks; and for given chunks."""

import numpy as np

from megatron_epp.cost.columns import TOKENS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import OF_HEAD, OF_LAYERS, Kind
from megatron_epp.planner.block_table import block_seconds
from megatron_epp.planner.chunks.chunking import Chunking


def lower_bound_seconds(
    lengths: np.ndarray,
    cost: Cost,
    forward_only: bool = False,
    local: bool = False,
) -> float:
    """The busiest stage's work, the way to it and back: exact sums over tokens and pairs.

    Every token and pair is computed once on every stage, communication inside ops included; at
    least one chunk pays its constants. Before a stage can begin, one chunk of at least one token
    has come through the stages in front of it; after its last op that others wait for, a gradient
    has to run back through them. A W keeps nobody waiting, so it may run meanwhile: the bound
    takes the cheaper of running it there and not. Where the cost has the output layer on all
    stages, so has the bound: H before the last B of its stage, G as a W. A rank that has several
    stages does the work of all of them, and hands messages between them over at once.

    local   whether documents may be local to a context-parallel rank: then no row need be exchanged
    """
    place = cost.layout.place
    batch_features = cost.layout.batch_features(lengths, 1.0)
    least = cost.layout.batch_features(np.ones(1), 1.0)  # a chunk of one token, one pair
    latency = cost.layout.links_per_token + cost.layout.profile.link_latency_seconds
    if place:
        latency = latency * (np.diff(place, append=place[-1]) != 0)
    forward = least_seconds_per(cost, Kind.FORWARD, local)
    ramp = np.concatenate(([0.0], np.cumsum(forward @ least + latency)[:-1]))
    head, head_weight = (cost.seconds.per(kind) @ batch_features for kind in OF_HEAD)
    if forward_only:
        return float((ramp + forward @ batch_features + head).max())
    back = least_seconds_per(cost, Kind.BACKWARD, local)
    halves = (least_seconds_per(cost, Kind.INPUT, local), cost.seconds.per(Kind.WEIGHT))
    gradient = np.minimum(back, halves[0])
    tail = np.concatenate(([0.0], np.cumsum(gradient @ least + latency)[:-1]))
    in_one = (
        forward @ batch_features
        + back @ batch_features
        + head
        + ramp
        + np.maximum(head_weight, tail)
    )
    weight = halves[1] @ batch_features + head_weight
    critical = forward @ batch_features + halves[0] @ batch_features + head
    in_halves = critical + ramp + np.maximum(weight, tail)
    busiest = float(np.minimum(in_one, in_halves).max())
    for rank in range(max(place, default=-1) + 1):
        on_rank = np.array(place) == rank
        backward = np.minimum(back, halves[0] + halves[1]) @ batch_features
        work = float((forward @ batch_features + backward + head + head_weight)[on_rank].sum())
        busiest = max(busiest, float(ramp[on_rank].min()) + work)
    return busiest


def least_seconds_per(cost: Cost, kind: Kind, local: bool) -> np.ndarray:
    """[stages, features]; without exchange where nothing need be spread over the ranks."""
    per = cost.seconds.per(kind)
    if local:
        per = per.copy()
        per[:, TOKENS] -= cost.seconds.exchange_per_token[kind]
    return per


def block_bound_seconds(lengths: np.ndarray, cost: Cost, width: int, local: bool = False) -> float:
    """The same for ``width`` replicas however the documents are dealt to them: one has at least its
    share of the work, and one the longest document.

    lengths   sorted, longest first
    local     of one replica alone: those in lockstep have no local documents
    """
    batch_bound = lower_bound_seconds(lengths, cost, local=local)
    if width == 1:
        return batch_bound
    return max(batch_bound / width, lower_bound_seconds(lengths[:1], cost))


def work_bound_seconds(loads: Loads, cost: Cost) -> float:
    """Return the busiest rank's work, below which no order of chunks of these loads comes.

    Nothing is recomputed, and backwards are whole or split, whatever is less.
    """
    of = {kind: block_seconds(cost, kind, loads) for kind in (*OF_LAYERS, *OF_HEAD)}
    backward = np.minimum(of[Kind.BACKWARD], of[Kind.INPUT] + of[Kind.WEIGHT])
    work = of[Kind.FORWARD] + backward + of[Kind.HEAD] + of[Kind.HEAD_WEIGHT]
    return max(cost.layout.placement.of_ranks(work.sum(axis=1).tolist()))


def ordered_bound_seconds(chunking: Chunking, loads: Loads, cost: Cost) -> float:
    """No plan that runs these chunks in this order, backwards whole, is faster.

    Every stage waits for the first chunk, does all work, and waits for the last gradient.
    """
    forward = block_seconds(cost, Kind.FORWARD, loads)
    backward = block_seconds(cost, Kind.BACKWARD, loads)
    last = int(chunking.backward[-1])
    ramp = np.cumsum(forward[:, 0]) - forward[:, 0]
    tail = np.cumsum(backward[:, last]) - backward[:, last]
    head, head_weight = (block_seconds(cost, kind, loads).sum(axis=1) for kind in OF_HEAD)
    work = forward.sum(axis=1) + head + backward.sum(axis=1)
    return float((ramp + work + np.maximum(tail, head_weight)).max())
