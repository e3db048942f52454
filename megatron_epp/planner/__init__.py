"""Planners: document lengths in, a checked plan out.

    PLANNERS[name](lengths, cost, options)       one replica's plan (a Planned), or what a method
                                                 without a pipeline would take (PlannedGroups)
    plan_step(lengths, cost, options, name, n)   documents dealt to n replicas, a plan for each
    evaluation_plan(lengths, cost)               forwards only
    choose(lengths, make_cost, devices, ...)     context-parallel and pipeline degrees

A plan is a pure function of these arguments: no clock, no chance, no order of the documents.
"""

from megatron_epp.planner.degrees import Choice, choose
from megatron_epp.planner.evaluation import evaluation_plan
from megatron_epp.planner.options import ALL, LEVERS, TRAINING, Options, parse_levers
from megatron_epp.planner.registry import GROUPS, PIPELINES, PLANNERS, planner_of
from megatron_epp.planner.replicas import deal, evaluation_step, plan_step
from megatron_epp.planner.result import GroupMicroBatch, Planned, PlannedGroups, PlannedStep

__all__ = [
    "ALL",
    "GROUPS",
    "LEVERS",
    "PIPELINES",
    "PLANNERS",
    "TRAINING",
    "Choice",
    "GroupMicroBatch",
    "Options",
    "Planned",
    "PlannedGroups",
    "PlannedStep",
    "choose",
    "deal",
    "evaluation_plan",
    "evaluation_step",
    "parse_levers",
    "plan_step",
    "planner_of",
]
