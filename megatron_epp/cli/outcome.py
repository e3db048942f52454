"""Result of planning one batch over all replicas, for tables and JSON."""

import time
from dataclasses import dataclass

import numpy as np

from megatron_epp.corpus.shared_prefixes import Batch, lengths_of
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Step
from megatron_epp.planner.choose.slow_hosts import slow_host_line
from megatron_epp.planner.comparison_methods import ABSENT, comparison_methods
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import COMPARISON_METHODS, PLANNERS, planner_of
from megatron_epp.planner.replicas import balance_replicas, plan_step
from megatron_epp.planner.result import PlannedReplica, PlannerResult
from megatron_epp.planner.runner import Runner, in_turn


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of planning one batch.

    Attributes:
        batch: number of the batch.
        planner: name of the planner.
        slowest: result of the slowest replica, which determines the time of the iteration.
        replicas: results of all replicas.
        lower_bound_seconds: seconds of the iteration that no plan can beat.
        plan_seconds: seconds that planning took.
        step: the step; None if ``planner`` makes no pipeline plans.
    """

    batch: int
    planner: str
    slowest: PlannerResult
    replicas: tuple[PlannerResult, ...]
    lower_bound_seconds: float
    plan_seconds: float
    step: Step | None

    @property
    def seconds(self) -> float:
        """Predicted seconds of the iteration."""
        return self.slowest.seconds

    def slow_host_line(self, cost: Cost, options: Options) -> str | None:
        """Return a line on what the slowest plan loses on slow hosts, if that is much."""
        if self.step is None or self.planner not in PLANNERS:
            return None
        slowest = next(at for at, each in enumerate(self.replicas) if each is self.slowest)
        first = slowest - slowest % options.lockstep
        group = self.replicas[first : first + options.lockstep]
        planned = [each for each in group if isinstance(each, PlannedReplica)]
        return slow_host_line(planned, cost, options, self.planner)

    @property
    def gap(self) -> float:
        """Relative distance to the lower bound: (seconds - lower bound) / seconds."""
        return max(0.0, 1 - self.lower_bound_seconds / self.seconds) if self.seconds else 0.0

    @property
    def fits(self) -> bool:
        """Whether the plans of all replicas fit the memory budget."""
        return all(replica.fits for replica in self.replicas)

    @property
    def peak_bytes(self) -> list[int]:
        """Peak bytes of each rank, the maximum over replicas; without ``step``, all peaks."""
        if self.step is None:
            return [int(peak) for replica in self.replicas for peak in replica.peak_bytes]
        return [
            int(max(peaks)) for peaks in zip(*(r.peak_bytes for r in self.replicas), strict=True)
        ]

    def facts(self) -> dict:
        """Return this outcome as a JSON object of ``compare --json``."""
        slowest = self.slowest
        return {
            "batch": self.batch,
            "planner": self.planner,
            "levers": list(slowest.levers) if self.planner == "epp" else [],
            "seconds": float(self.seconds),
            "lower_bound_seconds": float(self.lower_bound_seconds),
            "gap": float(self.gap),
            "bubble_ratio": float(slowest.bubble_ratio),
            "recompute_ratio": float(slowest.recompute_ratio),
            "comm_ratio": float(slowest.comm_ratio),
            "peak_bytes": self.peak_bytes,
            "plan_seconds": float(self.plan_seconds),
            "chunks": int(slowest.chunks),
            "pipelines": int(slowest.pipelines),
            "fits": bool(self.fits),
            "note": slowest.note,
            **({"packing_tokens": slowest.packing_tokens} if slowest.packing_tokens else {}),
        }


def outcome(
    batch: int,
    documents: Batch,
    cost: Cost,
    options: Options,
    planner: str,
    replicas: int,
    run: Runner = in_turn,
) -> Outcome:
    """Plan one batch.

    Args:
        batch: number of the batch.
        documents: document lengths, or documents with shared prefixes.
        cost: cost of the layout.
        options: options of the planner.
        planner: name of the planner.
        replicas: number of replicas.
        run: runner that maps a function over tasks, in this process or in worker processes.

    Raises:
        ValueError: if the batch cannot be planned, or ``planner`` does not support lockstep.
    """
    results: tuple[PlannerResult, ...]
    lengths = lengths_of(documents)
    if planner in PLANNERS:
        planned = plan_step(documents, cost, options, planner, replicas, run)
        results, step, took = planned.planned, planned.step, planned.plan_seconds
    elif options.lockstep > 1:
        raise ValueError(
            f"planner {planner!r} knows no replicas in lockstep (--ep); expected one of "
            f"{', '.join(PLANNERS)}"
        )
    else:
        assignments = balance_replicas(lengths, cost, replicas)
        method = comparison_methods()[planner]
        began = time.perf_counter()
        results = tuple(method([lengths[d] for d in held], cost, options) for held in assignments)
        step, took = None, time.perf_counter() - began
    slowest = max(results, key=lambda each: each.seconds)
    bound = slowest.lower_bound_seconds
    if replicas > 1 and (step is None or not any(plan.prefixes for plan in step.plans)):
        # For any assignment: some replica has at least the mean work, and one has the longest
        # document.
        chunks = [] if step is None else [c for plan in step.plans for c in plan.chunks]
        local = any(chunk.has_local for chunk in chunks)
        every = np.array(sorted(lengths, reverse=True))
        longest = lower_bound_seconds(every[:1], cost, local=local)
        per_replica = lower_bound_seconds(every, cost, local=local) / replicas
        bound = min(bound, max(longest, per_replica))
    return Outcome(batch, planner, slowest, results, bound, took, step)


def known_planner(name: str, *baselines: str) -> str:
    """Return ``name`` if it is one of ``baselines`` or the name of a planner.

    Raises:
        ValueError: if no planner has this name (the message lists near matches), or the planner
            exists in a checkout only.
    """
    if name in baselines or name in comparison_methods():
        return name
    if name in COMPARISON_METHODS:
        raise ValueError(ABSENT)
    return planner_of(name).name
