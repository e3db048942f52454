"""Global batches of documents: which ones, and how long, before a token is read.

Sample s of a training set is document ``s``: of one corpus, or of a blend in its order (blend.py).
Batch after batch takes the next ``size`` samples, as Megatron's sampler does; so what an iteration
trains on follows from the number of samples consumed, whatever the parallel layout.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy
import torch
from megatron.core import num_microbatches_calculator
from megatron.core.datasets.blended_dataset import BlendedDataset

from megatron_epp.corpus.overlong import Counts
from megatron_epp.mcore.data.blend import DocumentBuilder
from megatron_epp.mcore.data.documents import (
    DocumentConfig,
    DocumentDataset,
    check_corpora,
    require_same_documents,
)


class TokenSource(Protocol):
    """Any span of the documents' tokens; see :class:`Documents` for each method."""

    def inputs(self, sample: int, start: int, stop: int) -> numpy.ndarray: ...

    def targets(
        self, sample: int, start: int, stop: int
    ) -> tuple[numpy.ndarray, numpy.ndarray]: ...


class DocumentSource(TokenSource, Protocol):
    """Documents whose lengths are known, too, as batches are made of them."""

    @property
    def counts(self) -> Counts: ...

    def __len__(self) -> int: ...

    def lengths(self, samples: Sequence[int] | numpy.ndarray) -> numpy.ndarray: ...


class Documents:
    """A corpus or a blend of several, by sample number: lengths, and any span of the tokens."""

    def __init__(self, dataset: DocumentDataset | BlendedDataset) -> None:
        self.dataset = dataset
        self.parts: list[DocumentDataset] = (
            dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
        )

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def counts(self) -> Counts:
        """Over all corpora: what one epoch of each holds."""
        return sum((part.counts for part in self.parts), Counts())

    @property
    def fractions(self) -> str | None:
        """Which share of documents and tokens each corpus of a blend gives; None of one corpus."""
        if not isinstance(self.dataset, BlendedDataset):
            return None
        documents, tokens = numpy.array(self._drawn).T
        return ", ".join(
            f"{fraction:.1%} of the documents and {of_tokens:.1%} of the tokens from "
            f"{part.dataset_path}"
            for part, fraction, of_tokens in zip(
                self.parts, documents / documents.sum(), tokens / tokens.sum(), strict=True
            )
        )

    @property
    def mean_length(self) -> float:
        """Inputs of a document, on average over all samples."""
        documents, tokens = numpy.array(self._drawn).sum(0)
        return tokens / documents

    @cached_property
    def _drawn(self) -> list[tuple[int, int]]:
        """(documents, tokens) of each corpus over all samples."""
        counts = [len(self)]
        if isinstance(self.dataset, BlendedDataset):
            counts = numpy.bincount(self.dataset.dataset_index, minlength=len(self.parts)).tolist()
        return [
            (count, int(part.first_lengths(count).sum()))
            for part, count in zip(self.parts, counts, strict=True)
        ]

    def locate(self, samples: Sequence[int] | numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """(corpus, item of its DocumentDataset) of each sample: two [n] int64."""
        samples = numpy.asarray(samples, dtype=numpy.int64)
        if samples.size and not 0 <= samples.min() <= samples.max() < len(self):
            raise ValueError(
                f"samples {samples.min()} to {samples.max()} of a data set of {len(self)}"
            )
        if not isinstance(self.dataset, BlendedDataset):
            return numpy.zeros_like(samples), samples
        return (
            self.dataset.dataset_index[samples].astype(numpy.int64),
            self.dataset.dataset_sample_index[samples].astype(numpy.int64),
        )

    def lengths(self, samples: Sequence[int] | numpy.ndarray) -> numpy.ndarray:
        """Inputs of each sample's document, from the indices alone: [n] -> [n] int64."""
        corpora, items = self.locate(samples)
        lengths = numpy.empty_like(items)
        for corpus in numpy.unique(corpora):
            here = corpora == corpus
            lengths[here] = self.parts[corpus].lengths(items[here])
        return lengths

    def _item(self, sample: int) -> tuple[DocumentDataset, int]:
        corpora, items = self.locate([sample])
        return self.parts[int(corpora[0])], int(items[0])

    def tokens(self, sample: int, start: int = 0, stop: int | None = None) -> numpy.ndarray:
        """Tokens [start, stop) of a document, which has one more than inputs: int64."""
        part, item = self._item(sample)
        return part.tokens(item, start, stop)

    def inputs(self, sample: int, start: int, stop: int) -> numpy.ndarray:
        """Inputs [start, stop) of a document: int64. All that a first stage reads."""
        return self.tokens(sample, start, stop)

    def targets(self, sample: int, start: int, stop: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """(labels int64, loss mask float32) of the inputs [start, stop): what a last stage reads.

        Labels were made before any cut: the last label of a span is the first input of the next.
        """
        part, item = self._item(sample)
        return part.targets(item, start, stop)


@dataclass(frozen=True, slots=True)
class Batch:
    """A global batch: sample numbers and the inputs of their documents, one for one."""

    samples: numpy.ndarray  # [size] int64
    lengths: numpy.ndarray  # [size] int64


def scheduled_sizes() -> Callable[[int], int]:
    """Samples of the training batch that comes behind so many, by Megatron's own calculator: the
    same for every batch, or by --step-batch-size-schedule."""
    calculator = copy(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR)

    def size(consumed: int) -> int:
        calculator.update(consumed, consistency_check=False)
        return calculator.get_current_running_global_batch_size()

    return size


def scheduled_samples(iterations: int, size_after: Callable[[int], int]) -> int:
    """Samples of so many iterations from the first on."""
    consumed = 0
    for _ in range(iterations):
        consumed += size_after(consumed)
    return consumed


class GlobalBatches:
    """The global batches from ``consumed`` samples on; an iterator that can also look ahead.

    ``size``: samples of each, or of the one that comes behind so many.
    """

    def __init__(
        self, documents: DocumentSource, size: int | Callable[[int], int], consumed: int
    ) -> None:
        self.size_after = size if callable(size) else lambda _: size
        if self.size_after(consumed) < 1 or consumed < 0:
            raise ValueError(f"a batch of {size} documents after {consumed}; expected 1 or more")
        self.documents = documents
        self.consumed = consumed

    def __iter__(self) -> "GlobalBatches":
        return self

    def __next__(self) -> Batch:
        batch = self.peek()
        if batch is None:
            size = self.size_after(self.consumed)
            raise ValueError(
                f"the data set ends after {len(self.documents)} documents; {self.consumed} are "
                f"consumed and the next batch takes {size}: corpora given without weights "
                "last one epoch; give each a weight in --data-path, or train for fewer iterations"
            )
        self.consumed += len(batch.samples)
        return batch

    def peek(self, ahead: int = 0) -> Batch | None:
        """The batch ``ahead`` batches after the next, or None where the data set has ended."""
        first = self.consumed
        for _ in range(ahead):
            first += self.size_after(first)
        after = first + self.size_after(first)
        if after > len(self.documents):
            return None
        samples = numpy.arange(first, after)
        return Batch(samples, self.documents.lengths(samples))


class FullPasses(GlobalBatches):
    """Passes over all documents, again and again, each in the same ``batches`` batches.

    --full-validation: every pass has each document once, at most ``size`` in a batch.
    """

    def __init__(self, documents: DocumentSource, size: int) -> None:
        total = len(documents)
        self.batches = -(-total // size)
        self._bounds = [total * batch // self.batches for batch in range(self.batches + 1)]
        self._drawn = 0
        super().__init__(documents, size, 0)

    def __next__(self) -> Batch:
        batch = self.peek()
        self._drawn += 1
        return batch

    def peek(self, ahead: int = 0) -> Batch:
        """Return the batch ``ahead`` batches after the next."""
        number = (self._drawn + ahead) % self.batches
        samples = numpy.arange(self._bounds[number], self._bounds[number + 1])
        return Batch(samples, self.documents.lengths(samples))


def build_documents(
    config: DocumentConfig,
    sizes: Sequence[int | None],
    group: torch.distributed.ProcessGroup | None = None,
) -> list[Documents | None]:
    """Documents of train, valid and test, checked and built; for every rank to call.

    sizes   samples wanted of each; None is one epoch
    group   of all ranks, on the host, which must find the same documents; None: not compared

    ValueError: see ``check_corpora``; ranks that find other documents
    """
    check_corpora(config, sizes)
    if group is not None:
        require_same_documents(config, group)
    built = DocumentBuilder(DocumentDataset, list(sizes), lambda: True, config).build()

    return [None if dataset is None else Documents(dataset) for dataset in built]
