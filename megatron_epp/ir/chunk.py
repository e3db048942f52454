"""Chunk: the spans that a stage computes at once."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_epp.ir.errors import PlanError
from megatron_epp.ir.span import Span

EMPTY = "-"  # a chunk without spans, in a plan's text


@dataclass(frozen=True, slots=True)
class Chunk:
    """Spans that a stage computes in one op, in the order of their rows in the tensors.

    - Packed: whole short documents.
    - Split: one slice of a long document.
    - Hybrid: one slice of a long document and whole short documents.

    A document appears at most once in a chunk. A chunk may be empty (``-`` in text); every stage
    still runs the chunk's ops. A replica gets empty chunks if it has no documents, or if replicas
    that run in lockstep with it (ir.step) have more chunks.

    With context parallelism a chunk has the same number of rows on each rank: the rank's shards of
    spans, then the documents that the rank computes alone (``@RANK``), then padding.

        rank 0   0[0:900] first half    2[0:300]@0
        rank 1   0[0:900] second half   3[0:200]@1 padding

    Raises:
        PlanError: a document appears twice.
    """

    spans: tuple[Span, ...]

    def __post_init__(self):
        if len({span.document for span in self.spans}) != len(self.spans):
            raise PlanError(f"chunk {self}: a document appears twice; join its spans")

    @property
    def tokens(self) -> int:
        """Number of tokens in all spans."""
        return sum(span.tokens for span in self.spans)

    @property
    def has_local(self) -> bool:
        """Whether one context-parallel rank computes some document of the chunk alone."""
        return any(span.local for span in self.spans)

    @property
    def sharded_tokens(self) -> int:
        """Number of tokens in the spans that are sharded over all context-parallel ranks."""
        return sum(span.tokens for span in self.spans if not span.local)

    def local_tokens(self, ranks: int) -> list[int]:
        """Return [ranks]: tokens of documents that each context-parallel rank computes alone."""
        tokens = [0] * ranks
        for span in self.spans:
            if span.local:
                tokens[span.rank] += span.tokens
        return tokens

    def rows(self, ranks: int) -> int:
        """Return the rows of the chunk, summed over ``ranks`` context-parallel ranks.

        The single-rank documents of each rank are padded to the largest sum of their tokens on a
        rank. No other padding counts.
        """
        if ranks == 1 or not self.has_local:
            return self.tokens
        return self.sharded_tokens + ranks * max(self.local_tokens(ranks))

    @property
    def pairs(self) -> int:
        """Number of query-key pairs of the chunk's attention, without keys of shared prefixes."""
        return sum(span.pairs for span in self.spans)

    def __str__(self) -> str:
        return " ".join(map(str, self.spans)) or EMPTY

    @classmethod
    def parse(cls, words: Iterable[str]) -> "Chunk":
        """Return the chunk with the spans in ``words``; the word ``-`` stands for no spans.

        Raises:
            PlanError: there are no words, a word is not a valid span, or a document appears twice.
        """
        words = tuple(words)
        if not words:
            raise PlanError(f"a chunk holds no span; expected at least one, or {EMPTY} for none")
        return cls(() if words == (EMPTY,) else tuple(map(Span.parse, words)))
