"""How large a micro-batch is: the rows that travel between stages, and the documents in them.

Megatron's stages tell each other every message's shape before it is sent. Here the shapes of an
iteration are known beforehand: from the call where sequences are padded to one length, else from
the micro-batches on the ranks that read them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Extent:
    """Of one micro-batch, over all tensor- and context-parallel ranks.

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


# What tells the extent of a micro-batch, as the loop's iterator gives it; None: it cannot say.
Extents = Callable[[Any], Extent | int | None]


def extent_of(micro_batch: Any) -> Extent | None:
    """The extent of a micro-batch of a common form, or None: a mapping with ``tokens`` or
    ``input_ids`` [B, S] and, where documents are packed, ``packed_seq_params`` or ``cu_seqlens``.
    """
    if not isinstance(micro_batch, Mapping):
        return None
    tokens = next((micro_batch.get(k) for k in ("tokens", "input_ids") if k in micro_batch), None)
    if not torch.is_tensor(tokens) or tokens.dim() != 2 or tokens.is_nested:
        return None
    samples, rows = tokens.shape
    params = micro_batch.get("packed_seq_params")
    borders = micro_batch.get("cu_seqlens") if params is None else params.cu_seqlens_q
    if borders is None:
        return Extent(rows, samples)
    return Extent(rows * samples, 1, lengths_between(borders))


def lengths_between(borders: torch.Tensor | Sequence[int]) -> tuple[int, ...]:
    """Documents between cumulative lengths; those of no token, as padding makes them, left out."""
    flat = torch.as_tensor(borders).flatten().tolist()
    return tuple(b - a for a, b in pairwise(flat) if b > a)


def measured(micro_batch: Any, by: Extents | None, number: int) -> Extent | None:
    """The extent of micro-batch ``number``, by the loop's own function where there is one.

    ValueError: what that function says is no extent.
    """
    if by is None:
        return extent_of(micro_batch)
    found = by(micro_batch)
    if isinstance(found, bool) or not isinstance(found, Extent | int | None):
        raise ValueError(
            f"lengths(micro-batch {number}) gave {type(found).__name__}; expected an Extent, or "
            "the rows of its hidden states as a whole number"
        )
    return Extent(found) if isinstance(found, int) else found
