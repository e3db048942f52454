"""Hosts that issue ops slower than the cost model assumes.

Training measures the time of its host, but keeps the stages that were chosen before. A plan in a
file also keeps its chunks, and many small chunks take long on slow hosts.
"""

from collections.abc import Sequence

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import ANALYTIC
from megatron_epp.ir import Kind
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.planner.result import PlannedReplica
from megatron_epp.sim.in_step import in_step
from megatron_epp.sim.play import play

SLOW_HOST = 2.0  # host time in multiples of the assumed one
TELLING_LOSS = 0.05  # fraction of the time; a smaller loss is not reported


def assumes_host_time(cost: Cost) -> bool:
    """Return whether hosts take time to issue ops, by an assumption rather than a measurement."""
    analytic = cost.layout.profile.provenance.kind == ANALYTIC
    return analytic and bool(cost.seconds.host[Kind.FORWARD].any())


def with_hosts(cost: Cost, factor: float) -> Cost:
    """Return ``cost`` with the host time multiplied by ``factor``."""
    return cost.with_coefficients_times({"host_seconds": factor, "expert_host_seconds": factor})


def slow_host_line(
    planned: Sequence[PlannedReplica], cost: Cost, options: Options, planner: str
) -> str | None:
    """Return a line that says how much time plans lose on hosts SLOW_HOST times as slow as assumed.

    The loss is relative to a plan made for such hosts. The result is None if the loss is at most
    TELLING_LOSS, or if no host time is assumed (:func:`assumes_host_time`).

    Args:
        planned: plans of one replica, or of the replicas of a lockstep group.
        cost: cost model of the plans.
        options: planner options, such as levers and effort.
        planner: name of the planner.
    """
    if not assumes_host_time(cost):
        return None
    slow = with_hosts(cost, SLOW_HOST)
    tables = in_step([slow.table(each.plan) for each in planned])
    taken = max(play(each.plan, table).seconds for each, table in zip(planned, tables, strict=True))
    # A plan made for slow hosts takes about as long as this one on the assumed hosts, or longer.
    if taken <= max(each.seconds for each in planned) * (1 + TELLING_LOSS):
        return None
    lengths = [length for each in planned for length in each.plan.documents]
    best = PLANNERS[planner].plan_block(lengths, slow, options)
    loss = taken / max(each.seconds for each in best.planned) - 1
    if loss <= TELLING_LOSS:
        return None
    return (
        f"On hosts {SLOW_HOST:g} times as slow as assumed, this plan takes {loss:.0%} longer than "
        "a plan made for them; training measures its host, and plans for it."
    )
