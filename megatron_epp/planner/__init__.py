"""Planners: functions from document lengths to a checked plan.

    PLANNERS[name](lengths, cost, options)       one replica's plan (a PlannedReplica)
    plan_step(lengths, cost, options, name, n)   one plan for each of n balanced replicas
    evaluation_plan(lengths, cost)               forward-only plan

A plan is a pure function of these arguments. Time, random numbers and the order of the documents do
not affect it.

Names are imported on first use, because the planners import a compiler and a solver. These two
imports take most of a second, and programs that only read the options do not need them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_epp.planner.evaluation import evaluation_plan
    from megatron_epp.planner.options import ALL, LEVERS, TRAINING_LEVERS, Options, parse_levers
    from megatron_epp.planner.registry import (
        COMPARED,
        COMPARISON_METHODS,
        PACKED,
        PLANNERS,
        STOCK,
        planner_of,
    )
    from megatron_epp.planner.replicas import (
        balance_replicas,
        evaluation_part,
        evaluation_step,
        plan_part,
        plan_step,
    )
    from megatron_epp.planner.result import PlannedReplica, PlannedStep, PlannerResult

_HOME = {
    "evaluation": ("evaluation_plan",),
    "options": ("ALL", "LEVERS", "TRAINING_LEVERS", "Options", "parse_levers"),
    "registry": (
        *("COMPARED", "COMPARISON_METHODS", "PACKED", "PLANNERS", "STOCK"),
        "planner_of",
    ),
    "replicas": (
        *("balance_replicas", "evaluation_part", "evaluation_step"),
        *("plan_part", "plan_step"),
    ),
    "result": ("PlannedReplica", "PlannedStep", "PlannerResult"),
}
MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULE_OF[name]}"), name)
