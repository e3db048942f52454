"""Documents from a user's dataset whose item lengths are known before the items are read.

An item is a mapping, as in the variable-length datasets of Megatron-LM's main branch:

    tokens             [rows] int, the inputs
    labels             [rows] int, already shifted: the token that each row predicts
    loss_mask          [rows] 0 or 1: 1 where the label has a loss
    original_seq_len   number of rows of the document; the remaining rows are padding

Every epoch reads the items in the order of the dataset, without shuffling. The planner needs the
lengths before the items are read. So the dataset has an attribute ``original_seq_lens`` with the
``original_seq_len`` of every item.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy

from megatron_epp.corpus.idx_file import check_vocabulary
from megatron_epp.corpus.lengths import MOST_LENGTH
from megatron_epp.corpus.overlong import Counts, apply_context

# Cached items, because a later slice of them will be read.
_CACHED_ITEMS = 16


class VarlenItems(Protocol):
    """Dataset of variable-length items; ``original_seq_lens`` lists the items' token counts."""

    original_seq_lens: Sequence[int]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class ItemDocuments:
    """Documents of ``items``, with the interface of global_batches.Documents.

    Args:
        items: The dataset.
        context: Largest number of inputs of a document.
        overlong: Policy for longer documents: truncate, drop or split.
        wanted: Number of samples; None is one epoch.
        vocabulary: Number of rows of the embedding. Tokens must be less than this number.

    Raises:
        ValueError: The constructor finds invalid lengths or no usable document. Methods that read
            an item raise it if the item lacks a key or rows, contradicts ``original_seq_lens``, has
            a loss mask other than 0 and 1, or has a token, or a label with a loss, outside the
            vocabulary.
    """

    def __init__(
        self,
        items: VarlenItems,
        context: int,
        overlong: str,
        wanted: int | None,
        vocabulary: int,
    ):
        lengths = numpy.asarray(items.original_seq_lens)
        if lengths.ndim != 1 or len(lengths) != len(items) or lengths.dtype.kind not in "iu":
            raise ValueError(
                f"original_seq_lens of {type(items).__name__}: {lengths.dtype} of shape "
                f"{lengths.shape}; expected {len(items)} whole numbers, one for each item"
            )
        if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= MOST_LENGTH:
            raise ValueError(
                f"original_seq_lens of {type(items).__name__}: from {lengths.min()} to "
                f"{lengths.max()}; expected from 0 to {MOST_LENGTH} tokens"
            )
        self._items, self._vocabulary = items, vocabulary
        self._said = lengths.astype(numpy.int64)
        self._index = apply_context(self._said, context, overlong)
        if not self.counts.documents and wanted != 0:
            raise ValueError(f"{type(items).__name__}: no usable document: {self.counts}")
        self._samples = self.counts.documents if wanted is None else wanted
        self._read = lru_cache(_CACHED_ITEMS)(self._read_item)

    @property
    def counts(self) -> Counts:
        """Counts of the dataset's items and documents."""
        return self._index.counts

    def __len__(self) -> int:
        return self._samples

    def lengths(self, samples: Sequence[int] | numpy.ndarray) -> numpy.ndarray:
        """Return the number of inputs of each sample's document: [n] -> [n] int64.

        No item is read.
        """
        places = numpy.asarray(samples, numpy.int64) % self.counts.documents
        return self._index.inputs[places].astype(numpy.int64)

    def header(self, sample: int) -> str:
        """Return "": recorded steps have no comment lines, because the items have no corpus."""
        return ""

    def inputs(self, sample: int, start: int, stop: int) -> numpy.ndarray:
        """Return inputs [start, stop) of a sample's document: int64."""
        tokens, _, _, offset = self._rows(sample)
        return tokens[offset + start : offset + stop]

    def targets(self, sample: int, start: int, stop: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return labels (int64) and loss mask (float32) of a sample's inputs [start, stop)."""
        _, labels, mask, offset = self._rows(sample)
        return labels[offset + start : offset + stop], mask[offset + start : offset + stop]

    def _rows(self, sample: int) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, int]:
        place = sample % self.counts.documents
        rows = self._read(int(self._index.sequences[place]))
        return *rows, int(self._index.starts[place])

    def _read_item(self, number: int) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """Return (tokens, labels, loss mask) of an item without its padding."""
        item, announced = self._items[number], int(self._said[number])
        where = f"item {number} of {type(self._items).__name__}"
        columns = []
        for key in ("original_seq_len", "tokens", "labels", "loss_mask"):
            if key not in item:
                raise ValueError(f"{where}: has no {key!r}; expected {_KEYS}")
            columns.append(numpy.asarray(item[key]).reshape(-1))
        actual, tokens, labels, mask = columns
        if actual.tolist() != [announced]:
            raise ValueError(
                f"{where}: original_seq_len {actual.tolist()}, but original_seq_lens said "
                f"{announced}; expected the same: plans are made from lengths that were told ahead"
            )
        short = {
            key: len(column)
            for key, column in (("tokens", tokens), ("labels", labels), ("loss_mask", mask))
            if len(column) < announced
        }
        if short:
            raise ValueError(f"{where}: {short} rows; expected the {announced} of original_seq_len")
        tokens, labels, mask = (
            tokens[:announced],
            labels[:announced],
            mask[:announced].astype(numpy.float32),
        )
        if not numpy.isin(mask, (0.0, 1.0)).all():
            raise ValueError(f"{where}: loss_mask holds other numbers than 0 and 1")
        # Rows without a loss may have a label that is no token, such as -100.
        labels = numpy.where(mask == 1, labels, 0)
        for column in (tokens, labels):
            check_vocabulary(column, self._vocabulary, where)
        return tokens.astype(numpy.int64), labels.astype(numpy.int64), mask


_KEYS = "tokens, labels, loss_mask and original_seq_len"
