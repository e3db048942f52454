"""Measured seconds of ops against a cost model's: one by one, and in sorts."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_epp.ir import BACKWARDS, Kind, Op, Plan, Table, Timed


@dataclass(frozen=True, slots=True)
class Residual:
    """One op: its kind, the chunk's tokens and most context, and its seconds twice."""

    stage: int
    kind: Kind
    chunk: int
    tokens: int
    context: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def residuals(plan: Plan, table: Table, records: Iterable[Timed]) -> list[Residual]:
    """The residual of every op among ``records``; transfers are left out, and what took no time."""
    result = []
    for record in records:
        op = record.op
        if not isinstance(op, Op) or record.seconds <= 0:
            continue
        seconds = float(table.seconds[op.kind][record.stage][op.chunk])
        if op.kind in BACKWARDS:
            seconds += float(table.recompute_seconds[record.stage][op.chunk])
        chunk = plan.chunks[op.chunk]
        context = max((span.start for span in chunk.spans), default=0)
        result.append(
            Residual(
                record.stage, op.kind, op.chunk, chunk.tokens, context, seconds, record.seconds
            )
        )
    return result


class ErrorTable:
    """Residuals by stage, kind and powers of two of slice and context; a table of their errors."""

    HEADERS = ("stage", "op", "tokens", "context", "ops", "median error", "least", "most")

    def __init__(self):
        self._errors: dict[tuple[int, str, int, int], list[float]] = {}

    def add(self, added: Iterable[Residual]) -> None:
        for one in added:
            key = one.stage, one.kind.value, _power(one.tokens), _power(one.context)
            self._errors.setdefault(key, []).append(one.error)

    def rows(self, least: int = 1) -> list[list[str]]:
        """A line for every sort with at least ``least`` ops."""
        return [
            [
                str(stage), kind, _range(tokens), _range(context), str(len(errors)),
                f"{statistics.median(errors):+.1%}", f"{min(errors):+.1%}", f"{max(errors):+.1%}",
            ]
            for (stage, kind, tokens, context), errors in sorted(self._errors.items())
            if len(errors) >= least
        ]  # fmt: skip


def _power(number: int) -> int:
    """The largest power of two up to ``number``, or 0."""
    return 1 << number.bit_length() - 1 if number else 0


def _range(power: int) -> str:
    return f"{power}-{2 * power - 1}" if power else "0"
