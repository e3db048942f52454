"""Simulation of a plan with a table of seconds and bytes."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from megatron_epp.ir import (
    BACKWARDS,
    COMPUTE,
    KIND_CODE,
    OF_HEAD,
    Message,
    Op,
    Payload,
    Plan,
    PlanError,
    Table,
    Timed,
    check,
    ops_of_chunk,
    rules_of,
    slices_of,
)
from megatron_epp.sim.engine import OpArrays, Orders, Run, run
from megatron_epp.sim.inputs import op_arrays, orders_of
from megatron_epp.sim.rule_arrays import needs_for


@dataclass(frozen=True, slots=True)
class Wait:
    """Idle time of a rank before an op that waits for another op.

    Attributes:
        rank: pipeline rank.
        name: name of the rank (Plan.rank_name).
        stage: stage of ``op``.
        op: op that waits.
        start: start of the idle time in seconds.
        stop: end of the idle time in seconds.
        awaited: op that ``op`` waits for.
        source: stage of ``awaited``.
        why: description of the data that ``op`` needs from ``awaited``.
    """

    rank: int
    name: str
    stage: int
    op: Op
    start: float
    stop: float
    awaited: Op
    source: int
    why: str


@dataclass(frozen=True, slots=True)
class IdleTail:
    """Idle time of a rank between its last op and the end of the iteration."""

    rank: int
    name: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class PathOp:
    """Op on the critical path, and the reason why it could not start earlier."""

    stage: int
    op: Op
    start: float
    stop: float
    why: str


@dataclass(frozen=True, slots=True)
class MessageTiming:
    """Message with three times in seconds: computed, enters its link, arrives."""

    message: Message
    ready: float
    depart: float
    arrive: float


START = "the iteration begins"
BUSY = "its rank was busy"


@dataclass(frozen=True)  # no slots: what only pictures need is computed on demand
class Simulation:
    """Simulated times of a plan, in seconds since the iteration began, and its bytes per device.

    Attributes:
        plan: plan that was simulated.
        run: simulated events as arrays.
        seconds: seconds of the iteration.
        idle_seconds: idle seconds of each rank.
        bubble_ratio: idle time of all ranks / (ranks * seconds).
        recompute_ratio: recompute time of all ranks / (ranks * seconds).
        comm_ratio: exposed communication time of all ranks / (ranks * seconds).
        peak_bytes: peak bytes of each rank, including model states and buffers.
        left_bytes: bytes of each rank that no op has freed at the end; 0 for a complete plan.
    """

    plan: Plan
    run: Run
    seconds: float
    idle_seconds: tuple[float, ...]
    bubble_ratio: float
    recompute_ratio: float
    comm_ratio: float
    peak_bytes: tuple[int, ...]
    left_bytes: tuple[float, ...]

    @cached_property
    def records(self) -> tuple[Timed, ...]:
        """Stage, times and peak bytes of all ops, rank by rank in execution order."""
        peaks = np.rint(self.run.op_peak).astype(np.int64).tolist()
        start, stop = self.run.start.tolist(), self.run.stop.tolist()
        return tuple(
            Timed(stage, op, start[number], stop[number], peaks[number])
            for number, (stage, op) in enumerate(self._ops)
        )

    @cached_property
    def _ops(self) -> list[tuple[int, Op]]:
        return [place for order in self.plan.rank_orders for place in order]

    @cached_property
    def _boundaries(self) -> list[int]:
        """Index of every rank's first op, followed by the total number of ops."""
        return [0, *accumulate(map(len, self.plan.rank_orders))]

    @cached_property
    def _why(self) -> list[str]:
        return [need.why for rule in rules_of(self.plan).values() for need in rule.needs]

    @cached_property
    def bubbles(self) -> tuple[Wait | IdleTail, ...]:
        """All intervals in which a rank runs no op, with the reason, rank by rank."""
        waits: list[Wait | IdleTail] = []
        for rank, boundary in enumerate(pairwise(self._boundaries)):
            free, name = 0.0, self.plan.rank_name(rank)
            for number in range(*boundary):
                record = self.records[number]
                if record.start > free:
                    source, awaited = self._ops[self.run.source[number]]
                    why = self._why[self.run.need[number]]
                    stage, op = self._ops[number]
                    waits.append(
                        Wait(rank, name, stage, op, free, record.start, awaited, source, why)
                    )
                free = record.stop
            if free < self.seconds:
                waits.append(IdleTail(rank, name, free, self.seconds))
        return tuple(waits)

    @cached_property
    def critical_path(self) -> tuple[PathOp, ...]:
        """Chain of ops from the start of the iteration to its end; each op delays the next one."""
        run = self.run
        firsts = set(self._boundaries)
        number = int(np.argmax(run.stop))
        path = []
        while number >= 0:
            stage, op = self._ops[number]
            first = number in firsts
            free = 0.0 if first else run.stop[number - 1]
            if run.start[number] > free:
                why = self._why[run.need[number]]
                following = self._through_link(number)
            elif first:
                why, following = START, -1
            else:
                why, following = BUSY, number - 1
            path.append(PathOp(stage, op, float(run.start[number]), float(run.stop[number]), why))
            number = following
        return tuple(reversed(path))

    def _through_link(self, number: int) -> int:
        """Return the index of the op that delayed op ``number``.

        If the input was a message that queued on its link, the result is the producer of the first
        message in this queue. Otherwise it is the op that computed the input.
        """
        message = int(self.run.message[number])
        if message < 0:
            return int(self.run.source[number])
        while self.run.before[message] >= 0:
            message = int(self.run.before[message])
        return int(self.run.producer[message])

    @cached_property
    def flights(self) -> tuple[MessageTiming, ...]:
        """All messages; those of one rank are in the order of sending."""
        run = self.run
        flights = []
        for producer, consumer, *times in zip(
            run.producer.tolist(),
            run.consumer.tolist(),
            run.ready.tolist(),
            run.depart.tolist(),
            run.arrive.tolist(),
            strict=True,
        ):
            source, op = self._ops[producer]
            target, wanting = self._ops[consumer]
            payload = Payload.GRADIENT if op.kind in BACKWARDS else Payload.ACTIVATION
            if wanting.kind in OF_HEAD:
                payload = Payload.HEAD
            ranks = self.plan.rank_of[source], self.plan.rank_of[target]
            message = Message(payload, op.chunk, source, target, ranks)
            flights.append(MessageTiming(message, *times))
        return tuple(flights)

    def memory_curve(self, rank: int) -> tuple[tuple[float, float], ...]:
        """Return (seconds, bytes from then on) of ``rank`` at the start and the stop of each op."""
        run = self.run
        curve = []
        for number in range(*self._boundaries[rank : rank + 2]):
            curve.append((float(run.start[number]), float(run.op_peak[number])))
            curve.append((float(run.stop[number]), float(run.op_left[number])))
        return tuple(curve)


def play(plan: Plan, table: Table) -> Simulation:
    """Simulate ``plan`` with the seconds and bytes of ``table``.

    Args:
        plan: plan to simulate.
        table: seconds and bytes of the plan's ops.

    Raises:
        PlanError: the plan cannot run (:func:`~megatron_epp.ir.check.check`), or a duration is not
            finite.

    Example:
        >>> from megatron_epp.sim.unit_table import unit_table
        >>> plan = Plan.parse('''plan v1
        ... documents 900
        ... layers 2 2
        ... chunk 0: 0[0:900]
        ... stage 0: F0 B0
        ... stage 1: F0 B0
        ... ''')
        >>> play(plan, unit_table(plan)).seconds  # F takes 1 unit, B 2
        6.0
    """
    slices = slices_of(plan)
    orders = orders_of(plan)
    if not _once(orders, plan):
        check(plan)
        raise AssertionError("check passed a plan in which an op stands twice or never")
    branching = plan.orders if plan.prefixes else None
    arrays = op_arrays(table, slices, rules_of(plan), branching)
    result = run(orders, arrays, needs_for(plan.vocabulary_parallel, plan.forward_only))
    if not np.isfinite(result.seconds):
        check(plan)
        raise PlanError("the table holds a duration that is not a finite number")
    return _played(plan, table, orders, arrays, result)


def _once(orders: Orders, plan: Plan) -> bool:
    """Return whether every stage has each op of every chunk exactly once."""
    count = np.zeros((len(COMPUTE), plan.stages, len(plan.chunks)), np.int64)
    np.add.at(count, (orders.kind, orders.stage, orders.chunk), 1)
    matches = np.zeros(count.shape[1:], np.bool_)
    for kinds in ops_of_chunk(plan):
        wanted = np.array([kind in kinds for kind in COMPUTE], np.int64)
        matches |= (count == wanted[:, None, None]).all(axis=0)
    return bool(matches.all())


def _played(plan: Plan, table: Table, orders: Orders, arrays: OpArrays, result: Run) -> Simulation:
    rank = np.repeat(np.arange(plan.ranks), np.diff(orders.offset))
    op = (orders.kind.astype(np.int64), orders.stage, orders.chunk)
    recompute = np.zeros_like(arrays.seconds)
    comm = np.zeros_like(arrays.seconds)
    for kind in table.seconds:
        comm[KIND_CODE[kind]] = table.comm_seconds[kind]
    for kind in BACKWARDS:
        recompute[KIND_CODE[kind]] = table.recompute_seconds
    busy = np.bincount(rank, result.stop - result.start, plan.ranks)
    available = plan.ranks * result.seconds or 1.0  # if nothing takes time, all ratios are 0
    idle = np.maximum(result.seconds - busy, 0.0)
    return Simulation(
        plan,
        result,
        float(result.seconds),
        tuple(idle.tolist()),
        float(idle.sum() / available),
        float(recompute[op].sum() / available),
        float(comm[op].sum() / available),
        tuple(np.ceil(result.peak).astype(np.int64).tolist()),
        tuple(result.left.tolist()),
    )
