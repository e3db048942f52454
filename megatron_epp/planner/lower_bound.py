"""Lower bounds on the time of any plan: of a batch, and of given chunks."""

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
    local: bool = False,
    starts: np.ndarray | None = None,
) -> float:
    """Return a lower bound, in seconds, on the time of any plan of the batch.

    The bound is the work of the busiest stage, plus the time before its first input and after its
    last gradient. Every stage computes every token and pair once, including communication inside
    ops, and spends the constant time of at least one chunk. Before a stage can start, a chunk of at
    least one token must pass through the previous stages. At the end, its gradient must pass back
    through them. A stage's bound is the smaller one of those for split and for unsplit backwards.
    No stage waits for a W, so a W can run while the last gradient passes back.

    With vocabulary parallelism, H runs before the last B of its stage, and no stage waits for a G.
    A rank with several stages does the work of all its stages. Messages between stages of one rank
    take no time.

    Args:
        lengths: [documents] document lengths of one replica, in tokens.
        cost: cost model, including the stages and parallel degrees.
        local: whether documents may run on one context-parallel rank, without all-to-all.
        starts: [documents] positions of the first tokens if documents continue others; None: 0.
    """
    place = cost.layout.place
    batch_features = cost.layout.columns.batch_features(lengths, 1.0, starts)
    least = cost.layout.columns.batch_features(np.ones(1), 1.0)  # a chunk of one token, one pair
    latency = cost.layout.links_per_token + cost.layout.profile.link_latency_seconds
    if place:
        latency = latency * (np.diff(place, append=place[-1]) != 0)
    forward = least_seconds_per(cost, Kind.FORWARD, local)
    ramp = np.concatenate(([0.0], np.cumsum(forward @ least + latency)[:-1]))
    head, head_weight = (cost.seconds.per(kind) @ batch_features for kind in OF_HEAD)
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
    """Return the least seconds of an op kind per unit of each column: [stages, columns].

    Columns are tokens, query-key pairs and others (:mod:`megatron_epp.cost.columns`). If ``local``,
    the seconds do not include all-to-all between context-parallel ranks.
    """
    per = cost.seconds.per(kind).copy()
    if cost.seconds.halved_from < np.inf:
        per[:, TOKENS] -= cost.seconds.hidden_per_token[kind]
    if local:
        per[:, TOKENS] -= cost.seconds.exchange_per_token[kind]
    return per


def block_bound_seconds(
    lengths: np.ndarray,
    cost: Cost,
    width: int,
    local: bool = False,
    starts: np.ndarray | None = None,
) -> float:
    """Return a lower bound, in seconds, on the time of ``width`` replicas in lockstep.

    The bound holds for any assignment of documents: some replica has at least the mean work, and
    some replica has the longest document.

    Args:
        lengths: [documents] document lengths in tokens, in descending order.
        cost: cost model, including the stages and parallel degrees.
        width: number of replicas.
        local: whether documents may run on one context-parallel rank, without all-to-all; has an
            effect only if ``width`` is 1.
        starts: [documents] positions of the first tokens if documents continue others; None: 0.
    """
    batch_bound = lower_bound_seconds(lengths, cost, local=local, starts=starts)
    if width == 1:
        return batch_bound
    return max(batch_bound / width, lower_bound_seconds(lengths[:1], cost))


def work_bound_seconds(loads: Loads, cost: Cost) -> float:
    """Return the busiest rank's seconds of work: a lower bound for any order of these chunks.

    No layer is recomputed, and backwards are split if that is faster.
    """
    of = {kind: block_seconds(cost, kind, loads) for kind in (*OF_LAYERS, *OF_HEAD)}
    backward = np.minimum(of[Kind.BACKWARD], of[Kind.INPUT] + of[Kind.WEIGHT])
    work = of[Kind.FORWARD] + backward + of[Kind.HEAD] + of[Kind.HEAD_WEIGHT]
    return max(cost.layout.placement.of_ranks(work.sum(axis=1).tolist()))


def ordered_bound_seconds(chunking: Chunking, loads: Loads, cost: Cost) -> float:
    """Return a lower bound in seconds for all plans with this chunk order and unsplit backwards.

    Every rank waits for the first chunk on its first stage, does all its work, and waits for the
    last gradient of this stage.
    """
    forward = block_seconds(cost, Kind.FORWARD, loads)
    backward = block_seconds(cost, Kind.BACKWARD, loads)
    last, placement = int(chunking.backward[-1]), cost.layout.placement
    first = [placement.place.index(rank) for rank in range(placement.ranks)]
    ramp = np.cumsum(forward[:, 0]) - forward[:, 0]
    tail = np.cumsum(backward[:, last]) - backward[:, last]
    head, head_weight = (block_seconds(cost, kind, loads).sum(axis=1) for kind in OF_HEAD)
    work = forward.sum(axis=1) + head + backward.sum(axis=1)
    ranks_work, weight = (placement.of_ranks(each.tolist()) for each in (work, head_weight))
    return float((ramp[first] + ranks_work + np.maximum(tail[first], weight)).max())
