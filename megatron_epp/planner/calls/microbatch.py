"""Size of a micro-batch: shape of its hidden states, and lengths of its documents."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicrobatchShape:
    """Size of a micro-batch over all tensor- and context-parallel ranks.

    Attributes:
        rows: first dimension of the hidden states, including padding.
        samples: second dimension of the hidden states; 1 if documents are concatenated.
        documents: number of tokens of every document; attention stays within a document.
    """

    rows: int
    samples: int = 1
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.rows < 1 or self.samples < 1:
            raise ValueError(
                f"a micro-batch of {self.rows} rows x {self.samples} samples: expected at least 1"
            )
        if sum(self.documents) > self.rows * self.samples:
            raise ValueError(
                f"documents of {sum(self.documents)} tokens in a micro-batch of "
                f"{self.rows * self.samples}: expected at most as many"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens of the hidden states, including padding."""
        return self.rows * self.samples

    @property
    def pairs(self) -> int:
        """Number of query-key pairs of causal attention.

        If ``documents`` is empty, each sample counts as one document.
        """
        documents = self.documents or (self.rows,) * self.samples
        return sum(length * (length + 1) // 2 for length in documents)
