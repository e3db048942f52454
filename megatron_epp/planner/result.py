"""Results of planners: a plan with its prediction, or the time of a method without a pipeline."""

from dataclasses import dataclass

from megatron_epp.ir import Plan, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerResult:
    """Result of planning one replica's documents, with or without a pipeline.

    Attributes:
        planner: name of the planner.
        seconds: predicted seconds of the iteration.
        lower_bound_seconds: lower bound on ``seconds``, for these lengths and layers per stage.
        bubble_ratio: idle time of all ranks / (ranks x seconds).
        recompute_ratio: recompute time of all ranks / (ranks x seconds).
        comm_ratio: exposed communication time of all ranks / (ranks x seconds).
        peak_bytes: peak bytes on a device of each pipeline rank; without a pipeline, of each group
            of devices and micro-batch.
        fits: whether the peaks are within the budgets.
        chunks: number of chunks.
        pipelines: number of pipelines that run one after another; 0 without a pipeline.
        levers: levers that the planner was allowed to use.
        packing_tokens: length to which unsliced documents are packed; 0 if documents are not
            packed.
        note: description of the chunks, of recompute and of the order of ops.
        plan_seconds: wall seconds of planning one replica, for reports only; 0 if not measured.
    """

    planner: str
    seconds: float
    lower_bound_seconds: float
    bubble_ratio: float
    recompute_ratio: float
    comm_ratio: float
    peak_bytes: tuple[int, ...]
    fits: bool
    chunks: int
    pipelines: int = 0
    levers: tuple[str, ...] = ()
    packing_tokens: int = 0
    note: str = ""
    plan_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedReplica(PlannerResult):
    """Plan of one replica, checked and simulated until the last op of all stages has ended."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Plans of one iteration of the whole job: one plan per replica, with its documents."""

    step: Step
    planned: tuple[PlannedReplica, ...]
    plan_seconds: float

    @property
    def seconds(self) -> float:
        """Predicted time of the slowest replica."""
        return max(planned.seconds for planned in self.planned)
