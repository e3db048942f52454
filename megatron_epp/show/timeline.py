"""Timeline: a plan with the times at which its ops ran, predicted or measured."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_epp.ir import (
    BACKWARDS,
    KEEP,
    OFFLOAD,
    Op,
    Plan,
    PlanError,
    Slices,
    Timed,
    Transfer,
    check,
    slices_of,
)
from megatron_epp.show.reasons import LATE, critical_path, finished, op_of, wait_text, waited_for
from megatron_epp.show.units import fraction_text, seconds_text, ticks, time_ticks
from megatron_epp.sim.play import Simulation, Wait

# Shorter idle times, relative to the iteration, are not reported: clocks jitter.
_SHORTEST_BUBBLE = 1e-4


@dataclass(frozen=True, slots=True)
class Bubble:
    """Interval in which ``rank`` ran no op, and the reason, such as ``waits for F3 of stage 0``."""

    rank: int
    start: float
    stop: float
    reason: str = ""

    @property
    def seconds(self) -> float:
        """Duration of the bubble in seconds."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Timeline:
    """Contents of a picture: the ops of each rank, with times in seconds since the iteration began.

    Attributes:
        plan: plan that ran.
        title: title of the run.
        records: records of compute ops, each op of the plan at most once.
        transfers: records of sends and receives, if there are any.
        seconds: seconds of the iteration.
        bubbles: idle intervals of ranks: between two ops, before the first and after the last one.
        critical: (stage, op) of the critical path, first to last; may be empty.
        curves: for each rank, (seconds, bytes) at each change of the memory; may be empty.
        budget_bytes: memory budget of each rank in bytes; empty if there is none.
        unit: "s" for seconds; "units" if there is no cost model and ops take unit times.
    """

    plan: Plan
    title: str
    records: tuple[Timed, ...]
    transfers: tuple[Timed, ...]
    seconds: float
    bubbles: tuple[Bubble, ...]
    critical: tuple[tuple[int, Op], ...] = ()
    curves: tuple[tuple[tuple[float, float], ...], ...] = ()
    budget_bytes: tuple[float, ...] = ()
    unit: str = "s"

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return self.plan.ranks

    def rank_of(self, record: Timed) -> int:
        """Return the rank that ran the op of ``record``."""
        return self.plan.rank_of[record.stage]

    def name(self, record: Timed) -> str:
        """Return the name of the record's op, with its stage if a rank has several stages."""
        return self.plan.op_name(record.stage, op_of(record))

    def recomputed(self, record: Timed) -> float:
        """Return the fraction of the stage's layers that the op of ``record`` recomputes."""
        if record.op.kind not in BACKWARDS:
            return 0.0
        return recomputed_fraction(self.plan, record.stage, record.op.chunk)

    @property
    def summary(self) -> str:
        """Text with the numbers of stages, of ranks (if fewer than stages), and of chunks."""
        on = f" on {self.ranks} ranks" if self.plan.shares_ranks else ""
        return f"{self.plan.stages} stages{on}, {len(self.plan.chunks)} chunks"

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each rank ran an op."""
        busy = [0.0] * self.ranks
        for record in self.records:
            busy[self.rank_of(record)] += record.seconds
        return tuple(busy)

    @property
    def bubble_ratio(self) -> float:
        """Idle time / (ranks x makespan)."""
        if not self.seconds:
            return 0.0
        return max(0.0, 1 - sum(self.busy) / (self.ranks * self.seconds))

    def time_text(self, time: float) -> str:
        """Return ``time`` as text with its unit."""
        return seconds_text(time) if self.unit == "s" else f"{time:.4g} {self.unit}"

    def ticks(self, most: int, stop: float | None = None) -> list[tuple[float, str]]:
        """Return (time, label) of about ``most`` ticks from 0 to ``stop``; default: ``seconds``."""
        stop = self.seconds if stop is None else stop
        if self.unit == "s":
            return time_ticks(stop, most)
        return [(t, f"{t:g}{'' if t else f' {self.unit}'}") for t in ticks(stop, most)]

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Maximum of each rank's memory curve in bytes; empty if there are no curves."""
        return tuple(max((held for _, held in curve), default=0.0) for curve in self.curves)


def timeline(
    plan: Plan,
    records: Sequence[Timed],
    title: str = "",
    *,
    bubbles: Sequence[Bubble] | None = None,
    critical: Sequence[tuple[int, Op]] | None = None,
    curves: Sequence[Sequence[tuple[float, float]]] | None = None,
    budget_bytes: Sequence[float] = (),
    unit: str = "s",
) -> Timeline:
    """Return the timeline of one run of ``plan``, simulated or measured.

    Args:
        plan: plan that ran.
        records: records of the ops, and perhaps of the sends and receives, of the run.
        title: title of the run.
        bubbles: idle intervals with reasons; default: derived from the records.
        critical: critical path; default: derived from the records.
        curves: memory curve of each rank, as (seconds, bytes); default: derived from the records'
            peaks (:func:`memory_curve`).
        budget_bytes: memory budget of each rank in bytes; empty if there is none.
        unit: "s" for seconds, or "units" for times without a cost model.

    Raises:
        PlanError: the plan is invalid, or the records are not of a run of the plan.
    """
    check(plan)
    known = [set(order) for order in plan.orders]
    seen: set[tuple[int, Op]] = set()
    for record in records:
        if not 0 <= record.stage < plan.stages:
            raise PlanError(f"a record has stage {record.stage}; the plan has {plan.stages} stages")
        if not record.start <= record.stop:
            raise PlanError(f"stage {record.stage}: {record.op} stops before it starts")
        if isinstance(record.op, Transfer):
            continue
        if record.op not in known[record.stage]:
            raise PlanError(
                f"stage {record.stage}: a record of {record.op}, which the plan does not hold "
                "there; expected the records of a run of this plan"
            )
        if (record.stage, record.op) in seen:
            raise PlanError(f"stage {record.stage}: two records of {record.op}; expected one run")
        seen.add((record.stage, record.op))
    rank_of = plan.rank_of
    ordered = sorted(records, key=lambda r: (rank_of[r.stage], r.start, r.stop))
    ops = tuple(record for record in ordered if isinstance(record.op, Op))
    seconds = max((record.stop for record in ops), default=0.0)
    if curves is None:
        curves = [memory_curve(rank_ops, seconds) for rank_ops in by_rank(ops, plan)]
        if not any(record.peak_bytes for record in ops):
            curves = ()
    return Timeline(
        plan,
        title,
        ops,
        tuple(record for record in ordered if isinstance(record.op, Transfer)),
        seconds,
        tuple(idle(plan, ops, seconds) if bubbles is None else bubbles),
        tuple(critical_path(plan, ops) if critical is None else critical),
        tuple(tuple(curve) for curve in curves),
        tuple(budget_bytes),
        unit,
    )


def by_rank(records: Iterable[Timed], plan: Plan) -> list[list[Timed]]:
    """Return the records of each rank, in the order of ``records``."""
    rows: list[list[Timed]] = [[] for _ in range(plan.ranks)]
    for record in records:
        rows[plan.rank_of[record.stage]].append(record)
    return rows


def timeline_of(
    played: Simulation, title: str = "", budget_bytes: Sequence[float] = (), unit: str = "s"
) -> Timeline:
    """Return the timeline of a simulation.

    Args:
        played: result of :func:`~megatron_epp.sim.play.play`.
        title: title of the run.
        budget_bytes: memory budget of each rank in bytes; empty if there is none.
        unit: "s" for seconds, or "units" for times without a cost model.
    """
    bubbles = []
    ranks = range(played.plan.ranks)
    for bubble in played.bubbles:
        reason = finished(played.plan)
        if isinstance(bubble, Wait):
            reason = f"waits for {bubble.awaited} of stage {bubble.source} ({bubble.why})"
        bubbles.append(Bubble(bubble.rank, bubble.start, bubble.stop, reason))
    return timeline(
        played.plan,
        played.records,
        title,
        bubbles=bubbles,
        critical=[(step.stage, step.op) for step in played.critical_path],
        curves=[_closed(played.memory_curve(rank), played.seconds) for rank in ranks]
        if any(played.peak_bytes)
        else (),
        budget_bytes=budget_bytes,
        unit=unit,
    )


def _closed(curve: Sequence[tuple[float, float]], seconds: float) -> list[tuple[float, float]]:
    """Return the memory curve ``curve``, extended to the whole iteration of ``seconds``.

    Before its first and after its last op a rank holds its resident bytes.
    """
    if not curve:
        return [(0.0, 0.0), (seconds, 0.0)]
    resident = curve[-1][1]
    return [(0.0, resident), *curve, (seconds, resident)]


def idle(plan: Plan, records: Sequence[Timed], seconds: float) -> list[Bubble]:
    """Return the intervals in which a rank ran no op, with reasons derived from the records."""
    waits = waited_for(plan, records)
    bubbles = []
    for rank, rank_records in enumerate(by_rank(records, plan)):
        reached = 0.0
        for record in rank_records:
            if record.start - reached > _SHORTEST_BUBBLE * seconds:
                wait = waits.get((record.stage, op_of(record)))
                reason = wait_text(*wait, idle_since=reached) if wait else LATE
                bubbles.append(Bubble(rank, reached, record.start, reason))
            reached = max(reached, record.stop)
        if seconds - reached > _SHORTEST_BUBBLE * seconds:
            bubbles.append(Bubble(rank, reached, seconds, finished(plan)))
    return bubbles


def memory_curve(records: Sequence[Timed], seconds: float) -> list[tuple[float, float]]:
    """Return the points (seconds, bytes) of one rank's memory curve, from the peaks of its ops.

    ``records`` are in execution order. During an op, the value is the op's recorded peak. Between
    two ops, it is the lower of the two peaks. That is an upper bound, because both peaks include
    the bytes held between the ops. Before the first op and after the last op, it is 0.
    """
    points = [(0.0, 0.0)]
    for before, record in zip([None, *records], records, strict=False):
        if before is not None and record.start > before.stop:
            held = min(before.peak_bytes, record.peak_bytes)
            points.append((before.stop, held))
        points.append((record.start, record.peak_bytes))
    if records:
        points.append((records[-1].stop, 0.0))
    points.append((seconds, 0.0))
    return points


def chunk_names(plan: Plan) -> tuple[str, ...]:
    """Return a description of each chunk: ``slice 2 of 5 of document 0 and 3 whole documents``.

    If one context-parallel rank computes a document alone, the description includes this rank.
    """
    slices = slices_of(plan)
    names = []
    for chunk, (content, (place, count)) in enumerate(
        zip(plan.chunks, slice_places(slices), strict=True)
    ):
        document = slices.document[chunk]
        parts = [f"slice {place + 1} of {count} of document {document}"] if count else []
        others = [span.document for span in content.spans if span.document != document or not count]
        branches = [d for d in others if plan.prefixes and plan.prefixes[d] is not None]
        uncut = len(others) - len(branches)
        if branches:
            roots = sorted({str(plan.prefix_of(d)[0].document) for d in branches}, key=int)
            many = "es" if len(branches) > 1 else ""
            parts.append(
                f"{len(branches)} branch{many} of document{'s' * (len(roots) > 1)} "
                f"{' '.join(roots)}"
            )
        if uncut:
            ranks = [span.rank for span in content.spans if span.local]
            who = " ".join(map(str, sorted(set(ranks))))
            alone = f" ({len(ranks)} local, to rank{'s' * (' ' in who)} {who})" if ranks else ""
            parts.append(f"{uncut} whole document{'s' if uncut > 1 else ''}{alone}")
        names.append(" and ".join(parts) or "no document")
    return tuple(names)


def slice_places(slices: Slices) -> list[tuple[int, int]]:
    """Return (place, count) of the slice in every chunk; (0, 0) if a chunk has no slice.

    ``place`` is the number of earlier slices of the same document, and ``count`` the number of all
    its slices.
    """
    places = [(0, 0)] * len(slices.document)
    for first, document in enumerate(slices.document):
        before = slices.earlier[first]
        if document < 0 or (before >= 0 and slices.later[before] == first):
            continue
        chain = [first]
        while (chunk := slices.later[chain[-1]]) >= 0:
            chain.append(chunk)
        for place, chunk in enumerate(chain):
            places[chunk] = place, len(chain)
    return places


def local_fraction(plan: Plan) -> float:
    """Return the fraction of all tokens in documents that one context-parallel rank computes."""
    local = sum(s.tokens for chunk in plan.chunks for s in chunk.spans if s.local)
    return local / plan.tokens


def recomputed_fraction(plan: Plan, stage: int, chunk: int) -> float:
    """Return the fraction of the stage's layers that ``chunk`` recomputes, fully or in part."""
    choice = plan.recompute[stage][chunk]
    kept = choice.count(KEEP) + choice.count(OFFLOAD)
    return (len(choice) - kept) / len(choice) if choice else 0.0


def recomputes(plan: Plan) -> bool:
    """Return whether any backward recomputes a layer, fully or in part."""
    choices = {choice for stage in plan.recompute for choice in stage}
    return bool(set("".join(choices)) - {KEEP, OFFLOAD})


def offloaded_fraction(plan: Plan, stage: int, chunk: int) -> float:
    """Return the fraction of the stage's layers whose activations of ``chunk`` are offloaded."""
    choice = plan.recompute[stage][chunk]
    return choice.count(OFFLOAD) / len(choice) if choice else 0.0


def offloaded_ratio(plan: Plan) -> float:
    """Return the fraction of (token, layer) pairs whose activations are offloaded."""
    aside = sum(
        content.tokens * choices[chunk].count(OFFLOAD)
        for choices in plan.recompute
        for chunk, content in enumerate(plan.chunks)
    )
    return aside / (plan.tokens * sum(plan.layers)) if aside else 0.0


def offloaded_text(plan: Plan) -> str:
    """Return text such as ``, offloaded 12.3%`` to append to others; "" if nothing is offloaded."""
    ratio = offloaded_ratio(plan)
    return f", offloaded {fraction_text(ratio)}" if ratio else ""
