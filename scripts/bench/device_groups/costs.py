"""Costs of device groups without a pipeline: time and memory of documents on d devices.

Every group has all layers. Model states are spread over all devices of the replica.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.columns import CHUNKS, TOKENS, Columns
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import FULL, KEEP, Kind, PlanError
from megatron_epp.ir.placement import Placement
from megatron_epp.planner.choose.choice import with_placement
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.result import PlannerResult

# ZeRO 3 gathers among all devices of the replica, not inside a node as a pipeline stage does.
# InfiniPipe reports a fifth of the time for a stage's gathers.
ACROSS_NODES = 5.0
NODE_DEVICES = 8
# Static recompute to try, as fractions of the layers; FlexSP's runs use 0, and 0.6 for 30B.
RECOMPUTE_FRACTIONS = (0.0, 0.3, 0.6, 1.0)


# Groups that run at the same time: the degree number of each, and its documents.
MicroBatch = tuple[np.ndarray, Sequence[np.ndarray]]


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """Costs of groups by degree number: groups with number i have 2^i devices.

    Attributes:
        columns: columns of a document, of which the seconds are a linear function.
        degrees: [N] devices of a group.
        seconds: [N, columns] seconds of forward, backward and recompute.
        comm: [N, columns] seconds of these that are communication.
        recompute: [N, columns] seconds of these that are recompute.
        most_tokens: [N] largest number of tokens that a group can hold.
        token_bytes: [N] bytes on one device per token.
        states_bytes: [N] bytes of model states on one device.
    """

    columns: Columns
    degrees: np.ndarray
    seconds: np.ndarray
    comm: np.ndarray
    recompute: np.ndarray
    most_tokens: np.ndarray
    token_bytes: np.ndarray
    states_bytes: np.ndarray

    @property
    def devices(self) -> int:
        return int(self.degrees[-1])

    def document_seconds(self, lengths: np.ndarray) -> np.ndarray:
        """Return [D, N]: the seconds that each document adds to a group."""
        each = [self.columns.batch_features(lengths[d : d + 1], 0) for d in range(len(lengths))]
        return np.array(each) @ self.seconds.T


def group_costs(cost: Cost, recompute_layers: int = 0) -> GroupCosts:
    """Return the costs of groups of the pipeline's devices, rounded down to a power of two.

    Args:
        cost: cost model of the pipeline.
        recompute_layers: number of layers that are recomputed in full.
    """
    layout = cost.layout
    devices = 2 ** ((layout.stages * layout.cp).bit_length() - 1)
    gather_factor = ACROSS_NODES if devices * layout.tp > NODE_DEVICES else 1.0
    rows = []
    for degree in (2**power for power in range(devices.bit_length())):
        spread = cost.replace(
            layers=(sum(layout.layers),),
            device_budget_bytes=(min(cost.device_budget_bytes),),
            cp=degree,
            dp=layout.dp * devices // degree,
            # As many devices of the replica share the experts as its stages did together.
            ep=layout.ep * layout.stages if layout.ep > 1 else 1,
        )
        run, comm = (
            per(Kind.FORWARD)[0] + per(Kind.BACKWARD)[0]
            for per in (spread.seconds.per, spread.seconds.communication_per)
        )
        run[CHUNKS] += (gather_factor - 1) * comm[CHUNKS]
        comm[CHUNKS] *= gather_factor
        again, saved = _first_recomputed(spread, recompute_layers)
        profile = spread.layout.profile
        token_bytes = (
            saved + profile.first_bytes.per_token + profile.last_bytes.per_token
        ) / spread.layout.shards
        most_tokens = max(0.0, spread.headroom_bytes[0] / token_bytes)
        states_bytes = spread.memory.states_bytes[0]
        rows.append((degree, run + again, comm, again, most_tokens, token_bytes, states_bytes))
    return GroupCosts(layout.columns, *map(np.array, zip(*rows, strict=True)))


def _first_recomputed(cost: Cost, layers: int) -> tuple[np.ndarray, float]:
    """Return the costs of full recompute of the first ``layers`` layers of the only stage.

    The costs are the added seconds per feature, and the bytes per token that all layers save.
    """
    zero, grid = np.zeros((1, 1)), np.full((1, 1), layers)
    again, saved = np.zeros_like(cost.seconds.recompute_per((0, FULL))), 0.0
    by_kind = cost.layout.kinds.from_front(zero, grid)[:, 0, 0]
    counts = cost.layout.kinds.counts[:, 0]
    for kind, (first, every) in enumerate(zip(by_kind, counts, strict=True)):
        saved_bytes = cost.layout.coefficients[kind].saved_bytes
        again += first * cost.seconds.recompute_per((kind, FULL))
        saved += float((every - first) * saved_bytes[KEEP].per_token)
        saved += float(first * saved_bytes[FULL].per_token)
    return again, saved


def best_groups(
    planner: str,
    divide: Callable[[np.ndarray, GroupCosts], Iterator[tuple[str, list[MicroBatch]]]],
    lengths: Sequence[int],
    cost: Cost,
    options: Options,
) -> PlannerResult:
    """Return the fastest result over RECOMPUTE_FRACTIONS of static recompute.

    Args:
        planner: name of the method.
        divide: function that yields candidates, as a note and micro-batches, for the descending
            lengths and the costs of groups.
        lengths: tokens of the documents.
        cost: cost model of the pipeline.
        options: options of planners, which these methods do not have.

    Raises:
        PlanError: the longest document does not fit with everything recomputed.
    """
    batch, cost = SortedBatch.of(lengths), cost.with_vocabulary(False)
    if cost.layout.place:  # groups have no stages: only the number of devices counts
        cost = with_placement(cost, Placement(tuple(range(cost.layout.placement.ranks))))
    longest, layers, results = int(batch.lengths[0]), sum(cost.layout.layers), []
    for recompute in (round(fraction * layers) for fraction in RECOMPUTE_FRACTIONS):
        costs = group_costs(cost, recompute)
        if longest > costs.most_tokens[-1]:
            continue
        said = f", recompute {recompute} of {layers} layers" if recompute else ""
        for note, batches in divide(batch.lengths, costs):
            results.append(_result(planner, batches, batch.lengths, costs, cost, note + said))
    if not results:
        raise PlanError(
            f"a document of {longest} tokens does not fit all "
            f"{cost.layout.stages * cost.layout.cp} devices together with everything recomputed: "
            "raise the memory budget or use more devices"
        )
    return min(results, key=lambda result: result.seconds)


def _result(
    planner: str,
    batches: Sequence[MicroBatch],
    lengths: np.ndarray,
    costs: GroupCosts,
    cost: Cost,
    note: str,
) -> PlannerResult:
    """Return the result of successive micro-batches; in a bubble, groups wait for others."""
    total, fits, peaks = 0.0, True, []
    per_column = np.stack((costs.seconds, costs.comm, costs.recompute))
    device_seconds = np.zeros(3)  # in all, of communication, of recompute
    for which, groups in batches:
        slowest = 0.0
        for degree, held in zip(which.tolist(), groups, strict=True):
            features = costs.columns.batch_features(lengths[held], 1)
            seconds = per_column[:, degree] @ features
            device_seconds += costs.degrees[degree] * seconds
            slowest = max(slowest, float(seconds[0]))
            held_bytes = costs.states_bytes[degree] + costs.token_bytes[degree] * features[TOKENS]
            peaks.append(math.ceil(held_bytes))
            fits &= bool(features[TOKENS] <= costs.most_tokens[degree])
        total += slowest
    busy, comm, again = (device_seconds / (costs.devices * total)).tolist()
    return PlannerResult(
        planner=planner,
        chunks=len(peaks),
        seconds=total,
        lower_bound_seconds=min(total, lower_bound_seconds(lengths, _flat(cost))),
        bubble_ratio=1 - busy,
        recompute_ratio=again,
        comm_ratio=comm,
        peak_bytes=tuple(peaks),
        fits=fits,
        note=note,
    )


def _flat(cost: Cost) -> Cost:
    """Return a cost model of all devices as one stage, without communication, for a lower bound."""
    profile = cost.layout.profile.without_slowness.each_kind(
        all_to_all_bytes_per_token=0.0,
        tensor_bytes_per_token=0.0,
        expert_bytes_per_token=0.0,
        gather_seconds=dict.fromkeys(cost.layout.profile.gather_seconds, 0.0),
    )
    return cost.replace(
        profile=profile,
        layers=(sum(cost.layout.layers),),
        device_budget_bytes=cost.device_budget_bytes[:1],
        cp=cost.layout.cp * cost.layout.stages,
    )
