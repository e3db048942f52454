"""Span: tokens ``[start, stop)`` of one document."""

import re
from dataclasses import dataclass

from megatron_epp.ir.errors import PlanError, quoted

# The parser accepts only what the printer writes: no sign, no leading zero, and at most 15 digits,
# which a float64 of the simulator holds exactly.
NUMBER = r"(?:0|[1-9][0-9]{0,14})"
_SPAN = re.compile(rf"({NUMBER})\[({NUMBER}):({NUMBER})\](?:@({NUMBER}))?")
ALL_RANKS = -1  # value of ``rank``: the span's rows are sharded over all ranks


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Tokens ``[start, stop)`` of one document of this replica.

    The text form is ``2[0:900]``, or ``2[0:900]@1`` for a single-rank document.

    Attributes:
        document: number of the document.
        start: index of the first token.
        stop: index of the token after the last token.
        rank: context-parallel rank that computes the whole document alone; ALL_RANKS if the span's
            rows are sharded over all ranks.

    Raises:
        PlanError: a number is negative, the span is empty, or a single-rank document begins after
            token 0.
    """

    document: int
    start: int
    stop: int
    rank: int = ALL_RANKS

    def __post_init__(self):
        if self.document < 0 or not 0 <= self.start < self.stop:
            raise PlanError(f"span {self}: expected document >= 0 and 0 <= start < stop")
        if self.rank != ALL_RANKS and (self.rank < 0 or self.start):
            raise PlanError(
                f"span {self}: only a whole document is local to a rank, of 0 and more; a slice is "
                "over all"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    @property
    def local(self) -> bool:
        """Whether one context-parallel rank computes the span alone."""
        return self.rank != ALL_RANKS

    @property
    def pairs(self) -> int:
        """Number of query-key pairs: token i of the document attends to i + 1 tokens (causal)."""
        return (self.stop * (self.stop + 1) - self.start * (self.start + 1)) // 2

    def __str__(self) -> str:
        where = "" if self.rank == ALL_RANKS else f"@{self.rank}"
        return f"{self.document}[{self.start}:{self.stop}]{where}"

    @classmethod
    def parse(cls, text: str) -> "Span":
        """Return the span in ``text``, such as ``0[0:5000]``.

        Raises:
            PlanError: the text is not a valid span.
        """
        match = _SPAN.fullmatch(text)
        if match is None:
            raise PlanError(
                f"{quoted(text)} is not a span; expected DOCUMENT[START:STOP], as in 0[0:5000], "
                "with @RANK after it if one context-parallel rank computes the document"
            )
        return cls(*(int(number) for number in match.groups() if number is not None))
