"""Record of one executed op; the simulator and the executor use the same form.

The text form is the line ``timed v1`` and one line per record, with times in seconds since the
iteration began:

    STAGE OP START STOP PEAK_BYTES        0 F0 0.0 0.25 1048576
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_epp.ir.errors import PlanError, quoted
from megatron_epp.ir.op import Kind, Message, Op, Payload, Transfer
from megatron_epp.ir.span import NUMBER

# Accepts numbers as records print them; int() and float() also accept nan, signs and underscores.
_STAGE = re.compile(NUMBER)
MOST_SECONDS = 1e9  # thirty years; sums stay finite
MOST_RECORDS = 10_000_000  # blank lines included
_SECONDS = re.compile(r"-?[0-9]{1,16}(\.[0-9]{1,20})?(e[+-]?[0-9]{1,3})?")
_BYTES = re.compile(r"-?[0-9]{1,18}")
_TRANSFER = re.compile(rf"(SEND|RECV):([FBH])({NUMBER})([<>])({NUMBER})")


@dataclass(frozen=True, slots=True)
class Timed:
    """Execution of ``op`` on ``stage``.

    A RECEIVE lasts while the rank waits for its message, a SEND while the rank issues its message.

    Attributes:
        stage: stage of the op.
        op: op or transfer.
        start: start of the op, in seconds since the iteration began.
        stop: end of the op, in seconds since the iteration began.
        peak_bytes: peak bytes of chunks and caches (ir.rules.Item) on the stage during the op; 0
            for a transfer.
    """

    stage: int
    op: Op | Transfer
    start: float
    stop: float
    peak_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Duration of the op."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.stage} {self.op} {self.start!r} {self.stop!r} {self.peak_bytes}"

    @classmethod
    def parse(cls, line: str) -> "Timed":
        """Return the record in ``line``.

        Raises:
            PlanError: the line is not a record.
        """
        words = line.split()
        try:
            stage, op, start, stop, peak_bytes = words
            for pattern, word in (
                (_STAGE, stage),
                (_SECONDS, start),
                (_SECONDS, stop),
                (_BYTES, peak_bytes),
            ):
                if pattern.fullmatch(word) is None:
                    raise ValueError(word)
            seconds = float(start), float(stop)
            if max(map(abs, seconds)) > MOST_SECONDS:
                raise ValueError(seconds)
            return cls(int(stage), _parse_op(op, int(stage)), *seconds, int(peak_bytes))
        except ValueError as error:
            raise PlanError(
                f"{quoted(line)} is not a timed record; expected STAGE OP START STOP PEAK_BYTES, "
                f"times of at most {MOST_SECONDS:g} s"
            ) from error


def _parse_op(text: str, stage: int) -> Op | Transfer:
    match = _TRANSFER.fullmatch(text)
    if match is None:
        return Op.parse(text)
    kind, payload, chunk, way, peer = match.groups()
    if (kind == "SEND") != (way == ">"):
        raise PlanError(f"{quoted(text)} is not a transfer; expected SEND:F0>1 or RECV:F0<0")
    ends = (stage, int(peer)) if kind == "SEND" else (int(peer), stage)
    return Transfer(Kind(kind), Message(Payload(payload), int(chunk), *ends))


def format_records(records: Iterable[Timed]) -> str:
    """Return the text form of ``records``."""
    return "".join(f"{line}\n" for line in ("timed v1", *records))


def parse_records(text: str) -> tuple[Timed, ...]:
    """Parse the output of :func:`format_records`.

    Raises:
        PlanError: the first line is not ``timed v1``, another line is not a record, or there are
            more than MOST_RECORDS lines.
    """
    if (count := text.count("\n")) > MOST_RECORDS:
        raise PlanError(f"{count} lines; expected at most {MOST_RECORDS} of records")
    head, *lines = text.split("\n")
    if head.strip() != "timed v1":
        raise PlanError(f"{quoted(head)}: expected the line 'timed v1'")
    return tuple(map(Timed.parse, filter(str.strip, lines)))
