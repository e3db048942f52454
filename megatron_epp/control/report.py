"""Reports of an iteration: every stage's records, gathered, summed up and, if wanted, written."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.fitting.residuals import ErrorTable, residuals
from megatron_epp.ir import COMPUTE, Kind, Op, Step, Timed, format_records, parse_records
from megatron_epp.runtime.executor import Failure
from megatron_epp.show.table import plain
from megatron_epp.sim.in_step import in_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage's iteration in a few numbers; seconds and bytes.

    start, stop   of its first and last op
    busy          in F, B, I, W
    waiting       in receives and sends
    peak_bytes    the most held for chunks
    predicted_busy   what the cost model predicted for ``busy``; 0 where there is none
    failure       the op that ran out of memory, if one did; ``held_bytes``, how much was held
    host_bytes    the most that offloaded layers took of the host's memory
    """

    replica: int
    stage: int
    start: float
    stop: float
    busy: float
    waiting: float
    peak_bytes: int
    predicted_busy: float = 0.0
    failure: Op | None = None
    held_bytes: int = 0
    host_bytes: int = 0

    @classmethod
    def of(
        cls,
        replica: int,
        stage: int,
        records: tuple[Timed, ...],
        predicted_busy: float = 0.0,
        failure: Failure | None = None,
        host_bytes: int = 0,
    ) -> "StageReport":
        return cls(
            replica,
            stage,
            start=records[0].start,
            stop=records[-1].stop,
            busy=sum(r.seconds for r in records if r.op.kind in COMPUTE),
            waiting=sum(r.seconds for r in records if r.op.kind in (Kind.SEND, Kind.RECEIVE)),
            peak_bytes=max(r.peak_bytes for r in records),
            predicted_busy=predicted_busy,
            failure=None if failure is None else failure.op,
            held_bytes=0 if failure is None else failure.held_bytes,
            host_bytes=host_bytes,
        )

    def row(self) -> list[float]:
        """Every field as a number, an op as two in front; ``from_row`` is the way back."""
        op = self.failure
        failure = (-1, 0) if op is None else (COMPUTE.index(op.kind), op.chunk)
        return [*map(float, (*failure, *(getattr(self, field.name) for field in _numbers())))]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "StageReport":
        kind, chunk, *numbers = row
        failure = None if kind < 0 else Op(COMPUTE[int(kind)], int(chunk))
        pairs = zip(_numbers(), numbers, strict=True)
        values = {f.name: int(number) if f.type is int else number for f, number in pairs}
        return cls(**values, failure=failure)  # type: ignore[arg-type]


def _numbers() -> list[Field[Any]]:
    return [field for field in fields(StageReport) if field.name != "failure"]


@dataclass(frozen=True, slots=True)
class IterationReport:
    stages: tuple[StageReport, ...]

    @property
    def failures(self) -> tuple[StageReport, ...]:
        """Reports of the stages that ran out of memory."""
        return tuple(s for s in self.stages if s.failure is not None)

    @property
    def seconds(self) -> float:
        return max(s.stop for s in self.stages) - min(s.start for s in self.stages)

    @property
    def bubble_ratio(self) -> float:
        """Time in which stages run no op, over stages x iteration."""
        return 1 - sum(s.busy for s in self.stages) / (len(self.stages) * self.seconds)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Per stage, the worst replica's."""
        return self._worst(lambda report: report.peak_bytes)

    @property
    def host_bytes(self) -> tuple[int, ...]:
        """Per stage, the worst replica's."""
        return self._worst(lambda report: report.host_bytes)

    def _worst(self, bytes_of: Callable[[StageReport], int]) -> tuple[int, ...]:
        count = 1 + max(s.stage for s in self.stages)
        return tuple(
            max(bytes_of(s) for s in self.stages if s.stage == stage) for stage in range(count)
        )


def gather_report(mine: StageReport, leads: bool, group: dist.ProcessGroup) -> IterationReport:
    """All stages' reports on every rank: one all-gather of thirteen doubles on the host."""
    row = torch.tensor([float(leads), *mine.row()], dtype=torch.float64)
    rows = torch.empty(group.size() * row.numel(), dtype=torch.float64)
    dist.all_gather_into_tensor(rows, row, group=group)
    # A failure of any rank counts, whichever reports its stage.
    read = [
        (leading, StageReport.from_row(report))
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
        self.path(iteration, "step").write_text(str(step))
        for replica, timed in sorted(records.items()):
            timed.sort(key=lambda r: (r.stage, r.start))
            self.path(iteration, f"replica-{replica}.timed").write_text(format_records(timed))
            if cost is not None:
                block, plan = step.block(replica), step.plans[replica]
                tables = in_step([cost.table(one) for one in block])
                self._sorted.add(residuals(plan, tables[block.index(plan)], timed))
        if cost is not None:
            text = plain(ErrorTable.HEADERS, self._sorted.rows())
            (self.folder / "errors.txt").write_text(
                f"Seconds of ops, predicted over measured, less one, up to iteration {iteration}"
                f"\n\n{text}"
            )


def gather_records(
    replica: int, records: tuple[Timed, ...], leads: bool, group: dist.ProcessGroup
) -> dict[int, list[Timed]]:
    """On rank 0, every replica's records; nothing elsewhere."""
    mine = (replica, format_records(records)) if leads else None
    every: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(mine, every, group=group, group_dst=0)
    gathered: dict[int, list[Timed]] = {}
    for entry in every or ():
        if entry is not None:
            gathered.setdefault(entry[0], []).extend(parse_records(entry[1]))
    return gathered
