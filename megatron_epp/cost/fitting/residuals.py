"""Residuals: measured seconds of ops compared with a cost model's, one by one and in groups."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_epp.ir import BACKWARDS, Kind, Op, Plan, Table, Timed


@dataclass(frozen=True, slots=True)
class Residual:
    """Predicted and measured seconds of one op, with the chunk's tokens and longest context."""

    stage: int
    kind: Kind
    chunk: int
    tokens: int
    context: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured seconds, minus 1."""
        return self.predicted / self.measured - 1


def residuals(plan: Plan, table: Table, records: Iterable[Timed]) -> list[Residual]:
    """Return the residual of every op in ``records``, except transfers and ops of no duration."""
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
    """Table of errors by stage, kind of op, and ranges of tokens and context (powers of two)."""

    HEADERS = ("stage", "op", "tokens", "context", "ops", "median error", "least", "most")

    def __init__(self):
        self._errors: dict[tuple[int, str, int, int], list[float]] = {}

    def add(self, added: Iterable[Residual]) -> None:
        """Add residuals to the table."""
        for one in added:
            key = one.stage, one.kind.value, _power(one.tokens), _power(one.context)
            self._errors.setdefault(key, []).append(one.error)

    def rows(self, least: int = 1) -> list[list[str]]:
        """Return a row for every group with at least ``least`` ops."""
        return [
            [
                str(stage), kind, _range(tokens), _range(context), str(len(errors)),
                f"{statistics.median(errors):+.1%}", f"{min(errors):+.1%}", f"{max(errors):+.1%}",
            ]
            for (stage, kind, tokens, context), errors in sorted(self._errors.items())
            if len(errors) >= least
        ]  # fmt: skip


def _power(number: int) -> int:
    """Return the largest power of two up to ``number``, or 0."""
    return 1 << number.bit_length() - 1 if number else 0


def _range(power: int) -> str:
    return f"{power}-{2 * power - 1}" if power else "0"
