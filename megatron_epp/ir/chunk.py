"""A chunk: the spans that a stage computes at once."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_epp.ir.errors import PlanError
from megatron_epp.ir.span import Span


@dataclass(frozen=True, slots=True)
class Chunk:
    """Spans side by side in one pass; the rows of its tensors are the spans in this order.

    Packed: whole short documents. Split: one slice of a long document. Hybrid: one slice of a
    long document beside whole short ones. A document appears at most once in a chunk.
    """

    spans: tuple[Span, ...]

    def __post_init__(self):
        if not self.spans:
            raise PlanError("a chunk holds no span; expected at least one")
        if len({span.document for span in self.spans}) != len(self.spans):
            raise PlanError(f"chunk {self}: a document appears twice; join its spans")

    @property
    def tokens(self) -> int:
        return sum(span.tokens for span in self.spans)

    @property
    def pairs(self) -> int:
        """Query-key pairs of the chunk's attention, each span within its own document."""
        return sum(span.pairs for span in self.spans)

    def __str__(self) -> str:
        return " ".join(map(str, self.spans))

    @classmethod
    def parse(cls, words: Iterable[str]) -> "Chunk":
        return cls(tuple(map(Span.parse, words)))
