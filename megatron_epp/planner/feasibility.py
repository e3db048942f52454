"""Check that documents fit in memory and that planning is fast enough, with texts for users."""

from collections.abc import Sequence

import numpy as np

from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import FULL, KIND_CODE, Kind, PlanError, rules_for
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.sim.inputs import moved_bytes

# Bytes are linear in tokens except for rounding, which many tokens hide.
_MANY = 1_000_000


LONGER = 1.1  # a document that takes more than this times a replica's part is reported

# Cores of a host for planner processes, per device. GPU hosts have more than ten cores per device,
# and planner processes use half of the cores that ranks leave idle (control.planner_pool).
PLANNING_CORES = 1.0

# Numbers of slices tried for a single document: finer slices take less workspace.
_SLICES = (1, 2, 4, 16)


def _alone(cost: Cost, tokens: float, slices: int) -> np.ndarray:
    """Return the peak bytes [stages], without model states, if one document runs alone.

    All layers are recomputed. The forwards of all ``slices`` run first, then all backwards.
    """
    slices = max(1, min(slices, int(tokens)))
    edges = np.floor(np.linspace(0, tokens, slices + 1))
    parts = np.diff(edges)
    cut = slices > 1
    number = np.arange(slices)
    loads = Loads(
        tokens=parts,
        pairs=np.zeros(slices),
        cut_tokens=parts if cut else np.zeros(slices),
        document=np.full(slices, 0 if cut else -1),
        earlier=number - 1,
        later=np.where(number + 1 < slices, number + 1, -1),
        lengths=np.array([tokens]),
        spans=(number, edges[:-1], edges[1:]),
    )
    layers = np.tile(np.array(cost.layout.layers, dtype=np.float64)[:, None], (1, slices))
    rules = rules_for(cost.layout.vocabulary_parallel)
    moved = moved_bytes(cost.table_of(loads, cost.layout.kinds.first(FULL, layers)), loads, rules)
    # With vocabulary parallelism the first backward waits for the H of all slices.
    up, down = (Kind.FORWARD, Kind.HEAD), (Kind.BACKWARD, Kind.HEAD_WEIGHT)
    order = [(kind, c) for kind in up for c in range(slices)]
    order += [(kind, c) for c in reversed(range(slices)) for kind in down]
    held = np.zeros(cost.layout.stages)
    peak = np.zeros(cost.layout.stages)
    for kind, chunk in order:
        if kind in rules:
            makes, frees = moved[KIND_CODE[kind], :, :, chunk]
            peak = np.maximum(peak, held + makes)
            held = held + makes - frees
    return peak


def most_tokens(cost: Cost) -> int:
    """Return the maximum number of tokens of a chunk of uncut documents; at least 1.

    A chunk must fit in the memory of every rank if its backward recomputes all layers.
    """
    # Subtract the workspace that does not depend on the chunk's size.
    headroom = cost.headroom_bytes - np.array(
        cost.layout.placement.of_ranks(_alone(cost, 0, 1).tolist())
    )
    per_token = np.array(cost.layout.placement.of_ranks(_alone(cost, _MANY, 1).tolist())) / _MANY
    return max(1, int((headroom / np.maximum(per_token, 1e-9)).min()))


def require_fit(cost: Cost, documents: tuple[int, ...]) -> None:
    """Raise an error if the longest document does not fit in memory with any plan.

    All slices of a document are in flight between its last forward and its first backward. Even if
    all layers are recomputed, every slice holds the inputs, K and V of its layers, so finer slices
    only need less workspace.

    Raises:
        PlanError: if the longest of ``documents`` (lengths in tokens) does not fit.
    """
    longest = max(range(len(documents)), key=lambda d: documents[d])
    tokens = documents[longest]
    needed = np.min([_alone(cost, tokens, slices) for slices in _SLICES], axis=0)
    needed += np.array(cost.memory.states_bytes)
    for stage, rank in enumerate(cost.layout.placement.place):
        budget = cost.device_budget_bytes[rank]
        if needed[stage] > budget:
            raise PlanError(
                f"document {longest} of {tokens} tokens on stage {stage} needs at least "
                f"{needed[stage] / GIB:.4g} GiB with everything recomputed; the budget is "
                f"{budget / GIB:.4g} GiB: raise it, or use more devices or a shorter context"
            )


def overlong_for_replica(cost: Cost, lengths: Sequence[int], replicas: int) -> str | None:
    """Return a warning if a document takes more than LONGER times a replica's mean work, else None.

    ``lengths`` are the document lengths of the global batch in tokens.
    """
    seconds = rates_of(cost).document_seconds(np.asarray(lengths, np.int64))
    times = float(seconds.max() * replicas / seconds.sum())
    if replicas == 1 or times <= LONGER:
        return None
    factors = (factor for factor in range(2, replicas + 1) if replicas % factor == 0)
    factor = next((each for each in factors if each >= times), replicas)
    cp = cost.layout.cp * factor
    return (
        f"a document of {max(lengths)} tokens takes {times:.2f} times a replica's part of its "
        f"batch: replicas wait {1 - 1 / times:.0%} of the time for the one that has it; use "
        f"--context-parallel-size {cp}, with {replicas // factor} replicas, or a larger global "
        "batch"
    )


def planning_load(cost: Cost, plan_seconds: float, seconds: float) -> float:
    """Return the planning load: core seconds of planning over core seconds reserved for planning.

    If the load is above 1, training waits for its plans.

    Args:
        cost: cost model of a replica; the load is 0 if its network, and so the number of devices
            per host, is unknown.
        plan_seconds: core seconds of planning one replica.
        seconds: seconds of one iteration.
    """
    layout = cost.layout
    if layout.network is None:
        return 0.0
    host_devices = layout.network.host_devices
    replicas = max(1.0, host_devices / (layout.placement.ranks * layout.tp * layout.cp))
    return plan_seconds * replicas / (seconds * host_devices * PLANNING_CORES)


def late_plans(cost: Cost, plan_seconds: float, seconds: float) -> str | None:
    """Return a warning if training would wait for plans (:func:`planning_load` > 1), else None."""
    load = planning_load(cost, plan_seconds, seconds)
    if load <= 1:
        return None
    return (
        f"training would wait for its plans: they take {load:.1f} times what {PLANNING_CORES:g} "
        "core of a host for each of its devices computes in an iteration; use less --effort, more "
        "documents in a batch, or larger replicas"
    )


def no_plan_fits(cost: Cost, documents: tuple[int, ...], peaks: tuple[int, ...]) -> PlanError:
    """Return the error for a batch that fits no plan, although each document alone fits."""
    over = [peak - budget for peak, budget in zip(peaks, cost.device_budget_bytes, strict=True)]
    rank = max(range(len(over)), key=lambda r: over[r])
    longest = max(range(len(documents)), key=lambda d: documents[d])
    return PlanError(
        f"no plan fits: pipeline rank {rank} needs {peaks[rank] / GIB:.4g} GiB at best, mostly for "
        f"document {longest} of {documents[longest]} tokens; the budget is "
        f"{cost.device_budget_bytes[rank] / GIB:.4g} GiB: raise it, or use more devices or a "
        "shorter context"
    )
