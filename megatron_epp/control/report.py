"""Reports of an iteration: every rank's records, gathered, summed up and, if wanted, written."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.fitting.residuals import ErrorTable, residuals
from megatron_epp.ir import COMPUTE, Kind, Op, StageOp, Step, Timed, format_records, parse_records
from megatron_epp.runtime.executor import Failure
from megatron_epp.safe_files import replace_file
from megatron_epp.show.table import text_table
from megatron_epp.sim.in_step import in_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankReport:
    """One pipeline rank's iteration in a few numbers; seconds and bytes.

    start, stop   of its first and last op
    busy          in F, B, I, W
    waiting       in receives and sends
    peak_bytes    the most held for chunks
    predicted_busy   what the cost model predicted for ``busy``; 0 where there is none
    failure       the op that ran out of memory, and its stage, if one did; ``held_bytes``, how
                  much was held
    host_bytes    the most that offloaded layers took of the host's memory
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

    @classmethod
    def of(
        cls,
        replica: int,
        rank: int,
        records: tuple[Timed, ...],
        predicted_busy: float = 0.0,
        failure: Failure | None = None,
        host_bytes: int = 0,
    ) -> "RankReport":
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
        )

    @property
    def failed_op(self) -> str:
        """Text such as ``F3 of stage 2``."""
        assert self.failure is not None, "no op ran out of memory"
        return f"{self.failure.op} of stage {self.failure.stage}"

    def row(self) -> list[float]:
        """Return every field as a number, the first three of the failure; inverse: ``from_row``."""
        op = self.failure
        failure = (-1, 0, 0) if op is None else (COMPUTE.index(op.kind), op.chunk, op.stage)
        return [*map(float, (*failure, *(getattr(self, field.name) for field in _numbers())))]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "RankReport":
        kind, chunk, stage, *numbers = row
        op = None if kind < 0 else Op(COMPUTE[int(kind)], int(chunk))
        failure = None if op is None else StageOp(int(stage), op)
        pairs = zip(_numbers(), numbers, strict=True)
        values = {f.name: int(number) if f.type is int else number for f, number in pairs}
        return cls(**values, failure=failure)  # type: ignore[arg-type]


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
        return max(each.stop for each in self.ranks) - min(each.start for each in self.ranks)

    @property
    def bubble_ratio(self) -> float:
        """Time in which ranks run no op, over ranks x iteration."""
        return 1 - sum(each.busy for each in self.ranks) / (len(self.ranks) * self.seconds)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Per pipeline rank, the worst replica's."""
        return self._worst(lambda report: report.peak_bytes)

    @property
    def host_bytes(self) -> tuple[int, ...]:
        """Per pipeline rank, the worst replica's."""
        return self._worst(lambda report: report.host_bytes)

    def _worst(self, bytes_of: Callable[[RankReport], int]) -> tuple[int, ...]:
        count = 1 + max(each.rank for each in self.ranks)
        return tuple(
            max(bytes_of(each) for each in self.ranks if each.rank == rank) for rank in range(count)
        )


def gather_report(own_report: RankReport, leads: bool, group: dist.ProcessGroup) -> IterationReport:
    """All pipeline ranks' reports on every rank: one all-gather of fourteen doubles on the host."""
    row = torch.tensor([float(leads), *own_report.row()], dtype=torch.float64)
    rows = torch.empty(group.size() * row.numel(), dtype=torch.float64)
    dist.all_gather_into_tensor(rows, row, group=group)
    # A failure of any rank counts, whichever reports for its pipeline rank.
    read = [
        (leading, RankReport.from_row(report))
        for leading, *report in rows.view(group.size(), -1).tolist()
    ]
    return IterationReport(tuple(r for leading, r in read if leading or r.failure is not None))


class Recorder:
    """Writes ``iteration-000001.step`` and, per replica, ``...replica-0.timed`` into a folder, and
    ``errors.txt``: predicted against measured seconds by stage, op, slice and context."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self._sorted = ErrorTable()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--epp-record {folder}: {error.strerror}; name a folder") from error

    def path(self, iteration: int, what: str) -> Path:
        return self.folder / f"iteration-{iteration:06d}.{what}"

    def write(
        self, iteration: int, step: Step, records: dict[int, list[Timed]], cost: Cost | None = None
    ) -> None:
        """``cost`` is what ops were predicted by: then a table of its errors is kept, too."""
        replace_file(self.path(iteration, "step"), str(step))
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
    replica: int, records: tuple[Timed, ...], leads: bool, group: dist.ProcessGroup
) -> dict[int, list[Timed]]:
    """On rank 0, every replica's records; nothing elsewhere."""
    message = (replica, format_records(records)) if leads else None
    every: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(message, every, group=group, group_dst=0)
    gathered: dict[int, list[Timed]] = {}
    for entry in every or ():
        if entry is not None:
            gathered.setdefault(entry[0], []).extend(parse_records(entry[1]))
    return gathered
