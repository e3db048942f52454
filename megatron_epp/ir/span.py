"""Tokens ``[start, stop)`` of one document."""

import re
from dataclasses import dataclass

from megatron_epp.ir.errors import PlanError

# What the printer writes is what the parser takes: no sign, no leading zero, at most 15 digits
# (exact in a float64, which is what the simulator computes in).
NUMBER = r"(?:0|[1-9][0-9]{0,14})"
_SPAN = re.compile(rf"({NUMBER})\[({NUMBER}):({NUMBER})\]")


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Inputs ``[start, stop)`` of document ``document`` of this replica's part of the batch."""

    document: int
    start: int
    stop: int

    def __post_init__(self):
        if self.document < 0 or not 0 <= self.start < self.stop:
            raise PlanError(f"span {self}: expected document >= 0 and 0 <= start < stop")

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def pairs(self) -> int:
        """Query-key pairs of causal attention: token i of the document attends to i + 1 tokens."""
        return (self.stop * (self.stop + 1) - self.start * (self.start + 1)) // 2

    def __str__(self) -> str:
        return f"{self.document}[{self.start}:{self.stop}]"

    @classmethod
    def parse(cls, text: str) -> "Span":
        match = _SPAN.fullmatch(text)
        if match is None:
            raise PlanError(f"{text!r} is no span; expected DOCUMENT[START:STOP], as in 0[0:5000]")
        return cls(*map(int, match.groups()))
