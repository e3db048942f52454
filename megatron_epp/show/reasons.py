"""Why a stage idled and what held up the iteration, read from records by the rule table.

For measured runs. The simulator knows more (its links) and says it itself.
"""

from collections.abc import Sequence

from megatron_epp.ir import Need, Op, Plan, Timed, needs_of

LATE = "what it needs is there: message, launch or host are late"


def finished(plan: Plan) -> str:
    """Why a rank idles to the end."""
    return f"the {'rank' if plan.shares_ranks else 'stage'} has finished"


Ran = dict[tuple[int, Op], Timed]


def op_of(record: Timed) -> Op:
    """The op of a record that is known not to be a transfer's."""
    assert isinstance(record.op, Op)
    return record.op


def waited_for(plan: Plan, records: Sequence[Timed]) -> dict[tuple[int, Op], tuple[Timed, Need]]:
    """For every op that needs something: the producer that finished last, and the need."""
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
    """Why an op began late whose last need ``producer`` met; the stage was idle since then."""
    if producer.stop <= idle_since:
        return LATE
    return f"waits for {producer.op} of stage {producer.stage} ({need.why})"


def critical_path(plan: Plan, records: Sequence[Timed]) -> list[tuple[int, Op]]:
    """Ops from the begin to the end, each of which held up the next, as far as records tell.

    An op was held up by the op before it on its rank, or by the producer it waited for:
    whichever finished later.
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
        seen.add(key)  # clocks of two hosts may disagree: never run in circles
        path.append(key)
        held_up_by = [before.get(key), last[key][0] if key in last else None]
        at = max(
            (other for other in held_up_by if other is not None),
            key=lambda other: other.stop,
            default=None,
        )
    return path[::-1]
