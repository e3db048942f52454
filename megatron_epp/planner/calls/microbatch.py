"""How large a micro-batch is: the rows that travel between stages, and the documents in them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicrobatchShape:
    """One micro-batch over all tensor- and context-parallel ranks.

    rows        of the hidden states' first dimension, padding included
    samples     of their second: 1 where documents lie one behind the other
    documents   tokens of every document, within which tokens attend to each other
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
        return self.rows * self.samples

    @property
    def pairs(self) -> int:
        """Query-key pairs of causal attention; without documents each sample is one."""
        documents = self.documents or (self.rows,) * self.samples
        return sum(length * (length + 1) // 2 for length in documents)
