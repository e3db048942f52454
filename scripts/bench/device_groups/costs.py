"""Costs of device groups without a pipeline: time and memory of documents on d devices.

Every group has all layers. Model states are spread over all devices of the replica.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_epp.cost.columns import CHUNKS, PAIRS, TOKENS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import pairs_before
from megatron_epp.ir import FULL, KEEP, Kind
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.result import PlannerResult

# ZeRO 3 gathers among all devices of the replica, not inside a node as a pipeline stage does.
# InfiniPipe reports a fifth of the time for a stage's gathers.
ACROSS_NODES = 5.0
NODE_DEVICES = 8


@dataclass(frozen=True, slots=True)
class GroupMicroBatch:
    """Device groups that run at the same time: ``degrees[g]`` devices have ``documents[g]``."""

    degrees: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]  # of every group


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroups(PlannerResult):
    """Result of a method without a pipeline: successive micro-batches of device groups.

    ``bubble_ratio`` is the fraction of time in which groups wait for others.
    """

    batches: tuple[GroupMicroBatch, ...]


# The degree number of every group, and the documents on each.
MicroBatch = tuple[np.ndarray, Sequence[np.ndarray]]


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """Costs of groups by degree number: groups with number i have ``degrees[i]`` = 2^i devices.

    Sliding-window attention takes time in proportion to its pairs, for every degree, so pairs are
    weighted sums (:meth:`pairs`).

    token_seconds, pair_seconds, chunk_seconds   total of forward, backward and recompute
    comm_...                                     the part that is communication
    recompute_...                                the part that is recompute
    most_tokens                                  largest number of tokens that a group can hold
    token_bytes, states_bytes                    bytes on one device
    pair_weight                                  weight of pairs of full attention
    window_weights                               (window, weight of pairs) of windowed attention
    """

    degrees: np.ndarray
    token_seconds: np.ndarray
    pair_seconds: np.ndarray
    chunk_seconds: np.ndarray
    comm_token_seconds: np.ndarray
    comm_chunk_seconds: np.ndarray
    recompute_token_seconds: np.ndarray
    recompute_pair_seconds: np.ndarray
    most_tokens: np.ndarray
    token_bytes: np.ndarray
    states_bytes: np.ndarray
    pair_weight: float = 1.0
    window_weights: tuple[tuple[int, float], ...] = ()

    def pairs(self, lengths: Any) -> Any:
        """Return the weighted query-key pairs of documents, as a number or an array."""
        whole = lengths * (lengths + 1) / 2
        if not self.window_weights:
            return whole
        whole = self.pair_weight * whole
        for window, weight in self.window_weights:
            whole = whole + weight * pairs_before(lengths, window)
        return whole

    @property
    def devices(self) -> int:
        return int(self.degrees[-1])

    def seconds(self, which: int, tokens: float, pairs: float) -> float:
        return (
            self.token_seconds[which] * tokens
            + self.pair_seconds[which] * pairs
            + self.chunk_seconds[which]
        )


def group_costs(cost: Cost, recompute_layers: int = 0) -> GroupCosts:
    """Return the costs of groups of the pipeline's devices, rounded down to a power of two.

    Args:
        cost: cost model of the pipeline.
        recompute_layers: number of layers that are recomputed in full.
    """
    devices = 2 ** ((cost.layout.stages * cost.layout.cp).bit_length() - 1)
    layers = sum(cost.layout.layers)
    gather_factor = ACROSS_NODES if devices * cost.layout.tp > NODE_DEVICES else 1.0
    rows = []
    weights = np.ones(1)
    for degree in (2**power for power in range(devices.bit_length())):
        spread = cost.replace(
            layers=(layers,),
            device_budget_bytes=(min(cost.device_budget_bytes),),
            cp=degree,
            dp=cost.layout.dp * devices // degree,
            # As many devices of the replica share the experts as its stages did together.
            ep=cost.layout.ep * cost.layout.stages if cost.layout.ep > 1 else 1,
        )
        run = spread.seconds.per(Kind.FORWARD)[0] + spread.seconds.per(Kind.BACKWARD)[0]
        comm = (
            spread.seconds.communication_per(Kind.FORWARD)[0]
            + spread.seconds.communication_per(Kind.BACKWARD)[0]
        )
        again, saved = _first_recomputed(spread, recompute_layers)
        extra_gather = (gather_factor - 1) * comm[CHUNKS]
        profile = spread.layout.profile
        token_bytes = (
            saved + profile.first_bytes.per_token + profile.last_bytes.per_token
        ) / spread.layout.shards
        windows = [spread.layout.columns.index(each) for each in spread.layout.columns.windows]
        weights = (run + again)[[PAIRS, *windows]]
        if len(weights) > 1:
            # The same at every degree: pairs of all windows are spread alike.
            for part in (run, again):
                part[PAIRS] += sum(part[windows])
        headroom = spread.headroom_bytes[0]
        rows.append(
            (
                degree,
                *(run + again)[[TOKENS, PAIRS]],
                run[CHUNKS] + again[CHUNKS] + extra_gather,
                comm[TOKENS],
                comm[CHUNKS] + extra_gather,
                *again[[TOKENS, PAIRS]],
                max(0.0, headroom / token_bytes),
                token_bytes,
                spread.memory.states_bytes[0],
            )
        )
    columns = np.array(rows).T
    made = GroupCosts(columns[0].astype(np.int64), *columns[1:])
    if len(weights) == 1:
        return made
    pair, *others = (weights / weights.sum()).tolist()
    sizes = (each.size for each in cost.layout.columns.windows)
    weighted = tuple(zip(sizes, others, strict=True))
    return dataclasses.replace(made, pair_weight=pair, window_weights=weighted)


def _first_recomputed(cost: Cost, layers: int) -> tuple[np.ndarray, float]:
    """Return the costs of full recompute of the first ``layers`` layers of the only stage.

    The costs are the added seconds per feature, and the bytes per token that all layers save.
    """
    zero, grid = np.zeros((1, 1)), np.full((1, 1), layers)
    again, saved = np.zeros_like(cost.seconds.recompute_per((0, FULL))), 0.0
    by_kind = cost.layout.kinds.from_front(zero, grid)[:, 0, 0]
    for kind, (first, every) in enumerate(
        zip(by_kind, cost.layout.kinds.counts[:, 0], strict=True)
    ):
        kept, full = (
            cost.layout.coefficients[kind].saved_bytes[letter].per_token for letter in (KEEP, FULL)
        )
        again += first * cost.seconds.recompute_per((kind, FULL))
        saved += float((every - first) * kept + first * full)
    return again, saved


def planned_groups(
    planner: str,
    batches: Sequence[MicroBatch],
    lengths: np.ndarray,
    names: Sequence[int],
    costs: GroupCosts,
    cost: Cost,
    note: str,
) -> PlannedGroups:
    """Return the result of micro-batches: (degree number of every group, its documents) each."""
    made, peaks = [], []
    total = busy = comm = again = 0.0
    fits = True
    for which, groups in batches:
        seconds = []
        for degree, held in zip(which.tolist(), groups, strict=True):
            tokens = float(lengths[held].sum())
            pairs = float(costs.pairs(lengths[held]).sum())
            devices = float(costs.degrees[degree])
            taken = costs.seconds(degree, tokens, pairs) if len(held) else 0.0
            seconds.append(taken)
            busy += devices * taken
            if len(held):
                comm += devices * (
                    costs.comm_token_seconds[degree] * tokens + costs.comm_chunk_seconds[degree]
                )
            again += devices * (
                costs.recompute_token_seconds[degree] * tokens
                + costs.recompute_pair_seconds[degree] * pairs
            )
            peaks.append(
                int(np.ceil(costs.states_bytes[degree] + costs.token_bytes[degree] * tokens))
            )
            fits &= tokens <= costs.most_tokens[degree]
        total += max(seconds)
        made.append(
            GroupMicroBatch(
                tuple(costs.degrees[which].tolist()),
                tuple(tuple(names[d] for d in held) for held in groups),
                tuple(seconds),
            )
        )
    whole = costs.devices * total
    return PlannedGroups(
        planner=planner,
        batches=tuple(made),
        chunks=sum(len(batch.degrees) for batch in made),
        seconds=total,
        lower_bound_seconds=min(total, lower_bound_seconds(lengths, _flat(cost))),
        bubble_ratio=1 - busy / whole,
        recompute_ratio=again / whole,
        comm_ratio=comm / whole,
        peak_bytes=tuple(peaks),
        fits=bool(fits),
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
