"""The ``check`` command, which checks that a plan can run and fits in the memory of a machine."""

import argparse
import json

from megatron_epp.cli import machine
from megatron_epp.cli.files import read_plans, require_runnable
from megatron_epp.ir import Plan, PlanError


def run(arguments: argparse.Namespace) -> int:
    """Run the ``check`` command and return its exit status.

    Example::

        status = run(parse(["check", "p.plan"]))  # parse of cli.options

    Raises:
        PlanError: if a plan is invalid, cannot run, or exceeds the memory budget.
        ValueError: if the file cannot be read.
        UsageError: if the options of the machine contradict each other or the plan.
    """
    plans, step = read_plans(arguments.plan)
    require_runnable(plans, step, arguments.plan)
    if machine.names_machine(arguments):
        for plan in plans:
            _check_memory(arguments, plan, f"replica {plan.replica}: " if len(plans) > 1 else "")
    every = [_facts(plan) for plan in plans]
    if arguments.json:
        print(json.dumps(every))
        return 0
    for plan, facts in zip(plans, every, strict=True):
        ranks = f" on {plan.ranks} ranks" if plan.shares_ranks else ""
        print(
            f"ok: {facts['documents']} documents, {facts['tokens']} tokens in "
            f"{facts['chunks']} chunks on {facts['stages']} stages{ranks}, {facts['ops']} ops; "
            f"digest {facts['digest'][:16]}"
        )
    return 0


def _facts(plan: Plan) -> dict:
    return {
        "ok": True,
        "replica": plan.replica,
        "documents": len(plan.documents),
        "tokens": plan.tokens,
        "chunks": len(plan.chunks),
        "stages": plan.stages,
        "ops": sum(map(len, plan.orders)),
        "forward_only": plan.forward_only,
        "digest": plan.digest,
    }


def _check_memory(arguments: argparse.Namespace, plan: Plan, where: str) -> None:
    from megatron_epp.show.units import GIB
    from megatron_epp.sim.play import play

    cost = machine.plan_cost(arguments, plan)
    played = play(plan, cost.table(plan))
    budgets = cost.device_budget_bytes
    for rank, (peak, budget) in enumerate(zip(played.peak_bytes, budgets, strict=True)):
        if peak > budget:
            record = next(
                r
                for r in played.records
                if plan.rank_of[r.stage] == rank and r.peak_bytes >= peak - 1
            )
            op = plan.op_name(record.stage, record.op)  # type: ignore[arg-type]
            raise PlanError(
                f"{where}{plan.rank_name(rank)} at {op}: holds {peak / GIB:.3f} GiB, the budget is "
                f"{budget / GIB:.3f} GiB; recompute more, or use smaller chunks"
            )
