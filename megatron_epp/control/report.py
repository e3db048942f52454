"""Reports of an iteration: every rank's records, gathered, summarised and optionally written."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.control.step_source import Planning
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.fitting.residuals import ErrorTable, residuals
from megatron_epp.ir import (
    COMPUTE,
    FULL,
    KEEP,
    OFFLOAD,
    Kind,
    Op,
    Plan,
    StageOp,
    Step,
    StepPart,
    Timed,
    format_records,
    parse_records,
)
from megatron_epp.runtime.consensus import gathered
from megatron_epp.runtime.executor import Failure
from megatron_epp.runtime.groups import Groups
from megatron_epp.safe_files import replace_file
from megatron_epp.show.table import text_table
from megatron_epp.sim.in_step import in_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankReport:
    """Summary of one pipeline rank's iteration; times in seconds.

    Attributes:
        replica: data-parallel rank.
        rank: pipeline rank.
        start: start of the first op or transfer, on the rank's clock.
        stop: end of the last op or transfer, on the rank's clock.
        busy: time in compute ops.
        waiting: time in receives and sends.
        peak_bytes: peak of the bytes held for chunks.
        predicted_busy: the cost model's prediction of ``busy``; 0 without a cost model.
        failure: op that ran out of memory, with its stage; None if no op did.
        held_bytes: bytes held for chunks when op ``failure`` ran out of memory; 0 without failure.
        host_bytes: peak bytes of the offloaded layers in host memory.
        failed_tokens: number of tokens of the chunk in ``failure``; in lockstep, the maximum over
            the chunks of this op in all replicas of the lockstep group. 0 without failure.
        chunks: number of chunks of the replica's plan.
        recomputed: fraction of the plan's layers (over all chunks) that are recomputed in full.
        recomputed_in_part: fraction of the plan's layers with selective recomputation.
    """

    replica: int
    rank: int
    start: float
    stop: float
    busy: float
    waiting: float
    peak_bytes: int
    predicted_busy: float = 0.0
    failure: StageOp | None = None
    held_bytes: int = 0
    host_bytes: int = 0
    failed_tokens: int = 0
    chunks: int = 0
    recomputed: float = 0.0
    recomputed_in_part: float = 0.0

    @classmethod
    def of(
        cls,
        replica: int,
        rank: int,
        records: tuple[Timed, ...],
        predicted_busy: float = 0.0,
        failure: Failure | None = None,
        host_bytes: int = 0,
        block: Sequence[Plan] = (),
    ) -> "RankReport":
        """Summarise a rank's ``records``.

        Args:
            replica: data-parallel rank.
            rank: pipeline rank.
            records: timed ops and transfers of the rank, in order; at least one.
            predicted_busy: predicted seconds of the rank's ops; 0 without a cost model.
            failure: op that ran out of memory; None if no op did.
            host_bytes: peak bytes of the offloaded layers in host memory.
            block: plans of the lockstep group of ``replica``, including the plan of ``replica``. If
                it is empty, the fields that depend on plans are 0.
        """
        modes = _layer_modes(block, replica)
        failed = () if failure is None else [p.chunks[failure.op.chunk].tokens for p in block]
        return cls(
            replica,
            rank,
            start=records[0].start,
            stop=records[-1].stop,
            busy=sum(r.seconds for r in records if r.op.kind in COMPUTE),
            waiting=sum(r.seconds for r in records if r.op.kind in (Kind.SEND, Kind.RECEIVE)),
            peak_bytes=max(r.peak_bytes for r in records),
            predicted_busy=predicted_busy,
            failure=None if failure is None else StageOp(failure.stage, failure.op),
            held_bytes=0 if failure is None else failure.held_bytes,
            host_bytes=host_bytes,
            failed_tokens=max(failed, default=0),
            chunks=sum(len(plan.chunks) for plan in block if plan.replica == replica),
            recomputed=modes.count(FULL) / max(1, len(modes)),
            recomputed_in_part=sum(x not in (KEEP, FULL, OFFLOAD) for x in modes)
            / max(1, len(modes)),
        )

    @property
    def failed_op(self) -> str:
        """Failed op and its stage as text, such as ``F3 of stage 2``."""
        assert self.failure is not None, "no op ran out of memory"
        return f"{self.failure.op} of stage {self.failure.stage}"

    def row(self) -> list[float]:
        """Return all fields as numbers for an all-gather; the failure's numbers come first."""
        op = self.failure
        failure = (-1, 0, 0) if op is None else (COMPUTE.index(op.kind), op.chunk, op.stage)
        return [*map(float, (*failure, *(getattr(self, field.name) for field in _numbers())))]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "RankReport":
        """Return the report from the numbers of :meth:`row`."""
        kind, chunk, stage, *numbers = row
        op = None if kind < 0 else Op(COMPUTE[int(kind)], int(chunk))
        failure = None if op is None else StageOp(int(stage), op)
        pairs = zip(_numbers(), numbers, strict=True)
        values = {f.name: int(number) if f.type is int else number for f, number in pairs}
        return cls(**values, failure=failure)  # type: ignore[arg-type]


def _layer_modes(block: Sequence[Plan], replica: int) -> list[str]:
    """Return the recompute modes of all layers and chunks in the plan of ``replica``."""
    plans = (plan for plan in block if plan.replica == replica)
    return [x for plan in plans for stage in plan.recompute for choice in stage for x in choice]


def _numbers() -> list[Field[Any]]:
    return [field for field in fields(RankReport) if field.name != "failure"]


@dataclass(frozen=True, slots=True)
class IterationReport:
    """Reports of all pipeline ranks of all replicas."""

    ranks: tuple[RankReport, ...]

    @property
    def failures(self) -> tuple[RankReport, ...]:
        """Reports of the ranks that ran out of memory."""
        return tuple(each for each in self.ranks if each.failure is not None)

    @property
    def seconds(self) -> float:
        """Time from the first op's start to the last op's stop over all ranks."""
        return max(each.stop for each in self.ranks) - min(each.start for each in self.ranks)

    @property
    def chunks(self) -> int:
        """Number of chunks in the plans of all replicas."""
        return sum(each.chunks for each in self._of_replicas())

    @property
    def recomputed(self) -> float:
        """Fraction of the layers of all chunks and replicas that are recomputed in full."""
        return self._mean(lambda report: report.recomputed)

    @property
    def recomputed_in_part(self) -> float:
        """Fraction of the layers of all chunks and replicas with selective recomputation."""
        return self._mean(lambda report: report.recomputed_in_part)

    def _mean(self, ratio: Callable[[RankReport], float]) -> float:
        total = sum(each.chunks * ratio(each) for each in self._of_replicas())
        return total / max(1, self.chunks)

    def _of_replicas(self) -> list[RankReport]:
        return [each for each in self.ranks if each.rank == 0]

    @property
    def bubble_ratio(self) -> float:
        """Fraction of the ranks' time in which they run no compute op."""
        return 1 - sum(each.busy for each in self.ranks) / (len(self.ranks) * self.seconds)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak bytes of each pipeline rank, as the maximum over the replicas."""
        return self._worst(lambda report: report.peak_bytes)

    @property
    def host_bytes(self) -> tuple[int, ...]:
        """Host-memory peak of each pipeline rank, as the maximum over the replicas."""
        return self._worst(lambda report: report.host_bytes)

    def _worst(self, bytes_of: Callable[[RankReport], int]) -> tuple[int, ...]:
        count = 1 + max(each.rank for each in self.ranks)
        return tuple(
            max(bytes_of(each) for each in self.ranks if each.rank == rank) for rank in range(count)
        )


def gather_report(own_report: RankReport, leads: bool, group: dist.ProcessGroup) -> IterationReport:
    """Return the reports of all pipeline ranks on every rank, after one all-gather on the CPU.

    ``leads`` is whether this rank reports for its pipeline rank; other ranks report only failures.
    ``group`` is a CPU group of all ranks.
    """
    row = torch.tensor([float(leads), *own_report.row()], dtype=torch.float64)
    rows = torch.empty(group.size() * row.numel(), dtype=torch.float64)
    dist.all_gather_into_tensor(rows, row, group=group)
    # A failure counts on any rank; otherwise one rank reports for its pipeline rank.
    read = [
        (leading, RankReport.from_row(report))
        for leading, *report in rows.view(group.size(), -1).tolist()
    ]
    return IterationReport(tuple(r for leading, r in read if leading or r.failure is not None))


PLANNING_FILE = "planning.csv"
PLANNING_COLUMNS = ("iteration", "waited_seconds", "iterations_ahead", "discarded_plans")


class Recorder:
    """Writer of the files of ``--epp-record``.

    Iteration 1 has the files ``iteration-000001.step`` and ``iteration-000001.replica-0.timed``,
    the latter for each replica. ``errors.txt`` compares predicted with measured seconds by stage,
    op, tokens and context. ``planning.csv`` has the columns ``PLANNING_COLUMNS``.

    Args:
        folder: folder of the files, created if missing.

    Raises:
        ValueError: the folder cannot be created.
    """

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self._sorted, self._waits = ErrorTable(), dict[int, str]()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--epp-record {folder}: {error.strerror}; name a folder") from error

    def path(self, iteration: int, what: str) -> Path:
        """Return the path of the file of ``iteration`` with the suffix ``what``."""
        return self.folder / f"iteration-{iteration:06d}.{what}"

    def write(
        self,
        iteration: int,
        step: Step,
        records: dict[int, list[Timed]],
        cost: Cost | None = None,
        planning: Planning | None = None,
        header: str = "",
    ) -> None:
        """Write the files of one iteration.

        Args:
            iteration: number of the iteration.
            step: step of the iteration, with the plans of all replicas.
            records: timed ops of each replica.
            cost: cost model that predicted the ops; None writes no error table.
            planning: record of the planning, for ``planning.csv``; None adds no row.
            header: comment lines before the step (corpus/recorded_batch.py).

        Raises:
            OSError: a file cannot be written.
        """
        if planning is not None:
            self._waits[iteration] = (
                f"{iteration},{planning.waited_seconds:.6f},{planning.ahead},{planning.discarded}"
            )
            lines = [",".join(PLANNING_COLUMNS), *self._waits.values()]
            replace_file(self.folder / PLANNING_FILE, "".join(f"{line}\n" for line in lines))
        replace_file(self.path(iteration, "step"), header + str(step))
        for replica, timed in sorted(records.items()):
            timed.sort(key=lambda r: (r.stage, r.start))
            replace_file(self.path(iteration, f"replica-{replica}.timed"), format_records(timed))
            if cost is not None:
                block, plan = step.block(replica), step.plans[replica]
                tables = in_step([cost.table(one) for one in block])
                self._sorted.add(residuals(plan, tables[block.index(plan)], timed))
        if cost is not None:
            text = text_table(ErrorTable.HEADERS, self._sorted.rows())
            replace_file(
                self.folder / "errors.txt",
                f"Seconds of ops, predicted over measured, less one, up to iteration {iteration}"
                f"\n\n{text}",
            )


def gather_records(
    part: StepPart, records: tuple[Timed, ...], groups: Groups
) -> tuple[Step, dict[int, list[Timed]]] | None:
    """Gather the full step and every replica's records on rank 0 of the job.

    ``part`` and ``records`` are those of this rank. Rank 0 returns the step and the records by
    replica; the other ranks return None.
    """
    text = str(part) if groups.plans else ""  # sent once for each lockstep group
    local = format_records(records) if groups.leads else ""
    every = gathered((groups.replica, local, text), groups.control)
    if every is None:
        return None
    of_replicas: dict[int, list[Timed]] = {}
    for replica, timed, _ in every:
        if timed:
            of_replicas.setdefault(replica, []).extend(parse_records(timed))
    parts = sorted((StepPart.parse(text) for *_, text in every if text), key=lambda p: p.first)
    return Step.of_parts(parts), of_replicas
