"""Results of planners: a plan with its prediction, or the time of a method without a pipeline."""

from dataclasses import dataclass

from megatron_epp.ir import Plan, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerResult:
    """Outcome of planning one replica's documents, by whatever method.

    lower_bound_seconds   no plan for these lengths with these layers on a stage is faster
    *_ratio               of stages x seconds: idle; recomputing; exposed communication
    peak_bytes            everything on the device: per stage; per device where it has several
                          stages; of every group of every micro-batch where there is no pipeline
    chunks                parts that the documents were cut and packed into
    pipelines             one after another; 0 where there is none
    levers                those that the planner was allowed to use
    packing_tokens        that whole documents are packed to; 0 where chunks have no such length
    note                  how the planner came to it: the chosen slice count, bins, order
    plan_seconds          wall time of planning, for reports alone: it influences nothing; 0
                          before the registry has timed it
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

    @property
    def gap(self) -> float:
        """(seconds - lower bound) / seconds"""
        return max(0.0, 1 - self.lower_bound_seconds / self.seconds) if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedReplica(PlannerResult):
    """One replica's plan, checked and played; a pipeline ends where all stages have drained."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The whole job's iteration: its documents balanced, a plan per replica, how each was found."""

    step: Step
    planned: tuple[PlannedReplica, ...]
    plan_seconds: float

    @property
    def seconds(self) -> float:
        """The slowest replica's."""
        return max(planned.seconds for planned in self.planned)
