"""Reasons for bubbles, and the critical path, of measured runs.

Both are derived from records of ops and the rule table. For simulated runs, the simulator computes
both, because it also knows the state of the links (sim/play).
"""

from collections.abc import Sequence

from megatron_epp.ir import Need, Op, Plan, Timed, needs_of

LATE = "what it needs is there: message, launch or host are late"


def finished(plan: Plan) -> str:
    """Return the reason why a rank is idle after its last op."""
    return f"the {'rank' if plan.shares_ranks else 'stage'} has finished"


Ran = dict[tuple[int, Op], Timed]


def op_of(record: Timed) -> Op:
    """Return the op of a record; the record must not be a send or receive."""
    assert isinstance(record.op, Op)
    return record.op


def waited_for(plan: Plan, records: Sequence[Timed]) -> dict[tuple[int, Op], tuple[Timed, Need]]:
    """Return {(stage, op): (record of the op that computed its last input, dependency)}."""
    needs = needs_of(plan)
    ran: Ran = {(record.stage, op_of(record)): record for record in records}
    last: dict[tuple[int, Op], tuple[Timed, Need]] = {}
    for stage, op in ran:
        for need, where, ops in needs(stage, op):
            for other in ops:
                producer = ran.get((where, other))
                if producer is None:
                    continue
                if (stage, op) not in last or producer.stop > last[stage, op][0].stop:
                    last[stage, op] = producer, need
    return last


def wait_text(producer: Timed, need: Need, idle_since: float) -> str:
    """Return the reason why an op started late.

    Args:
        producer: record of the op that computed the last input.
        need: dependency on this op.
        idle_since: time in seconds since which the rank was idle.
    """
    if producer.stop <= idle_since:
        return LATE
    return f"waits for {producer.op} of stage {producer.stage} ({need.why})"


def critical_path(plan: Plan, records: Sequence[Timed]) -> list[tuple[int, Op]]:
    """Return (stage, op) of the critical path from start to end, derived from the records.

    Two ops may be the predecessor of an op on the path: the preceding op on its rank, and the last
    of the ops that it depends on. The one that finished later is chosen.
    """
    if not records:
        return []
    last = waited_for(plan, records)
    before: dict[tuple[int, Op], Timed] = {}
    latest: dict[int, Timed] = {}
    for record in sorted(records, key=lambda record: (record.start, record.stop)):
        rank = plan.rank_of[record.stage]
        if rank in latest:
            before[record.stage, op_of(record)] = latest[rank]
        latest[rank] = record
    at: Timed | None = max(records, key=lambda record: record.stop)
    path: list[tuple[int, Op]] = []
    seen = set()
    while at is not None and (at.stage, at.op) not in seen:
        key = at.stage, op_of(at)
        seen.add(key)  # clocks of two hosts may differ: avoid cycles
        path.append(key)
        held_up_by = [before.get(key), last[key][0] if key in last else None]
        at = max(
            (other for other in held_up_by if other is not None),
            key=lambda other: other.stop,
            default=None,
        )
    return path[::-1]
