"""Shapes of concatenated or padded documents, common to several frameworks."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from megatron_epp.planner.calls.microbatch import MicrobatchShape


def multiple_of(size: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is at least ``size``."""
    return -(-size // unit) * unit


def in_a_row(documents: Iterable[int], each: int = 1, whole: int = 1) -> MicrobatchShape:
    """Return the shape of concatenated documents (THD).

    Each document is padded to a multiple of ``each``, then all rows to a multiple of ``whole``.
    """
    lengths = tuple(int(length) for length in documents)
    rows = sum(multiple_of(length, each) for length in lengths)
    return MicrobatchShape(multiple_of(rows, whole), 1, tuple(filter(None, lengths)))


def beside(documents: Sequence[int], rows: int) -> MicrobatchShape:
    """Return the shape of documents that are each padded to ``rows`` rows (BSHD)."""
    return MicrobatchShape(rows, len(documents), tuple(filter(None, map(int, documents))))


def lengths_between(boundaries: Any) -> tuple[int, ...]:
    """Return the document lengths for cumulative lengths; skip empty documents (padding)."""
    flat = torch.as_tensor(boundaries).flatten().tolist()
    return tuple(b - a for a, b in pairwise(flat) if b > a)


def kept(mask_BS: torch.Tensor) -> list[int]:
    """Return the number of set elements in every row of an attention mask [B, S]."""
    return mask_BS.bool().sum(-1).tolist()
