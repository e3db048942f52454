"""Op templates: what the plans of replicas in lockstep must have in common.

If experts are sharded over several replicas, the ranks of these replicas synchronise in every
forward, in every backward, and wherever the backward recomputes the experts:

    replica 0   stage 0: F0 F1 B1 B0   recompute 0: 2k 1f1k
    replica 1   stage 0: F0 F1 B1 B0   recompute 0: 2k 1m1k      equal: both recompute layer 0's MLP

All replicas must therefore run the same ops in the same order on each pipeline rank. For every
chunk the same layers must recompute their MLP, in any of the modes ir.recompute.MLP_RECOMPUTED.
Documents, spans, tokens and recompute of other modules may differ between replicas. If each plan
can run alone, all plans can run together, because they have the same needs between ranks.

A plan does not say which layers have experts, so the modes of all layers are compared.
"""

from typing import NoReturn

from megatron_epp.ir.errors import PlanError
from megatron_epp.ir.grid import COLUMNS
from megatron_epp.ir.plan import Plan
from megatron_epp.ir.recompute import MLP_RECOMPUTED, format_recompute
from megatron_epp.ir.step import Step, StepPart


def check_op_templates(step: Step | StepPart) -> None:
    """Check that the replicas of each lockstep group have the same op template; O(ops).

    The op template consists of the orders of ops and the layers that recompute their MLP.

    Raises:
        PlanError: two replicas differ. The first line of the message names the place. If the orders
            differ, the ops of all replicas around that place follow.
    """
    for first in range(0, len(step.plans), step.lockstep):
        check_op_template(step.plans[first : first + step.lockstep])


def check_op_template(block: tuple[Plan, ...]) -> None:
    """Check that the plans of one lockstep group have the same op template; O(ops).

    Raises:
        PlanError: see :func:`check_op_templates`.
    """
    for plan in block[1:]:
        _compare(block, plan)


def _compare(block: tuple[Plan, ...], plan: Plan) -> None:
    """Raise a PlanError if ``plan`` has another op template than the group's first plan."""
    leader = block[0]
    who = f"lockstep {len(block)}: replica {plan.replica}"
    if len(plan.chunks) != len(leader.chunks):
        raise PlanError(
            f"{who} has {len(plan.chunks)} chunks, replica {leader.replica} {len(leader.chunks)}; "
            "expected the same number, with '-' for a chunk without spans"
        )
    for rank, (order, other) in enumerate(zip(leader.rank_orders, plan.rank_orders, strict=True)):
        if order == other:
            continue
        at = next(
            (at for at, (one, two) in enumerate(zip(order, other, strict=False)) if one != two),
            min(len(order), len(other)),
        )
        here = plan.op_name(*other[at]) if at < len(other) else "nothing"
        there = plan.op_name(*order[at]) if at < len(order) else "nothing"
        _parted(
            f"{who} runs {here} on {plan.rank_name(rank)} where replica {leader.replica} runs "
            f"{there}; expected the same ops in the same order",
            block,
            rank,
            at,
        )
    again: dict[str, tuple[bool, ...]] = {}
    for stage, (choices, others) in enumerate(zip(leader.recompute, plan.recompute, strict=True)):
        if choices == others:
            continue
        for chunk, (one, two) in enumerate(zip(choices, others, strict=True)):
            for choice in (one, two):
                if choice not in again:
                    again[choice] = tuple(mode in MLP_RECOMPUTED for mode in choice)
            if again[one] != again[two]:
                raise PlanError(
                    f"{who} recomputes {format_recompute(two)} of chunk {chunk} on stage {stage}, "
                    f"replica {leader.replica} {format_recompute(one)}; expected the same layers "
                    f"to run their MLP again ({', '.join(sorted(MLP_RECOMPUTED))})"
                )


def _parted(line: str, block: tuple[Plan, ...], rank: int, at: int) -> NoReturn:
    """Raise a PlanError with ``line`` and a grid of the replicas' ops; ``>`` marks op ``at``."""
    first = max(0, at - COLUMNS // 2)
    orders = [[plan.op_name(*place) for place in plan.rank_orders[rank]] for plan in block]
    stop = max(min(first + COLUMNS, len(order)) for order in orders)
    rows = []
    for plan, order in zip(block, orders, strict=True):
        cells = [order[place] if place < len(order) else "." for place in range(first, stop)]
        cells += ["."] * (at - first + 1 - len(cells))
        cells[at - first] = f">{cells[at - first]}"
        rows.append((f"replica {plan.replica}:", cells, " ..." if stop < len(order) else ""))
    width = max(len(cell) for _, cells, _ in rows for cell in cells)
    name = max(len(who) for who, _, _ in rows)
    before = "... " if first else ""
    grid = [
        f"  {who:<{name}} {before}{' '.join(f'{cell:>{width}}' for cell in cells)}{after}"
        for who, cells, after in rows
    ]
    raise PlanError("\n".join([line, *grid]))
