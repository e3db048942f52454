"""Global batches of documents: sample numbers and document lengths, before any token is read.

Sample s of a training set is item s of one corpus, or item s of a blend. Each batch
consists of the next ``size`` samples, as in Megatron's sampler. So the documents of an iteration
depend only on the number of consumed samples. They are the same for every parallel layout.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from megatron.core import num_microbatches_calculator
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.training import global_vars

from megatron_epp.corpus.blend import DOCUMENTS, TOKENS, TokenOrder, document_weights
from megatron_epp.corpus.overlong import Counts
from megatron_epp.corpus.recorded_batch import RecordedBatch
from megatron_epp.mcore.data.documents import (
    DocumentConfig,
    DocumentDataset,
    check_corpora,
    require_same_documents,
)


class TokenSource(Protocol):
    """Source of tokens, which returns any span of a document; see :class:`Documents`."""

    def inputs(self, sample: int, start: int, stop: int) -> numpy.ndarray:
        """Return inputs [start, stop) of a sample's document as int64."""

    def targets(self, sample: int, start: int, stop: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return labels (int64) and loss mask (float32) of the inputs [start, stop)."""


class DocumentSource(TokenSource, Protocol):
    """Source of documents and their lengths, for :class:`GlobalBatches`."""

    @property
    def counts(self) -> Counts:
        """Counts of all sequences and documents."""

    def __len__(self) -> int: ...

    def lengths(self, samples: Sequence[int] | numpy.ndarray) -> numpy.ndarray:
        """Return the number of inputs of each sample's document: [n] -> [n] int64."""

    def header(self, sample: int) -> str:
        """Return the comment lines before the recorded step whose first sample is ``sample``.

        They name the corpora from which the step's documents were drawn (corpus/recorded_batch.py).
        The text is empty if the documents belong to no corpus.
        """


class Documents:
    """Documents of a corpus or of a blend, indexed by sample number."""

    def __init__(self, dataset: DocumentDataset | BlendedDataset) -> None:
        self.dataset = dataset
        self.parts: list[DocumentDataset] = (
            dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
        )

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def counts(self) -> Counts:
        """Counts of sequences and documents in one epoch, summed over the corpora."""
        return sum((part.counts for part in self.parts), Counts())

    @property
    def fractions(self) -> str | None:
        """Text on the fractions of documents and tokens of each corpus; None without a blend."""
        if not isinstance(self.dataset, BlendedDataset):
            return None
        tokens = [
            fraction * part.mean_length
            for fraction, part in zip(self._document_fractions, self.parts, strict=True)
        ]
        return ", ".join(
            f"{fraction:.1%} of the documents and {of_tokens / sum(tokens):.1%} of the tokens from "
            f"{part.dataset_path}"
            for part, fraction, of_tokens in zip(
                self.parts, self._document_fractions, tokens, strict=True
            )
        )

    @property
    def mean_length(self) -> float:
        """Mean number of inputs per document, of whole epochs."""
        pairs = zip(self._document_fractions, self.parts, strict=True)
        return sum(fraction * part.mean_length for fraction, part in pairs)

    @property
    def _document_fractions(self) -> list[float]:
        """Fraction of the documents that come from each corpus, in the long run: sum 1."""
        if not isinstance(self.dataset, BlendedDataset):
            return [1.0]
        weights: list[float] = self.dataset.weights  # without a size: documents of each corpus
        if isinstance(self.dataset, TokenBlend):
            return document_weights(weights, [part.mean_length for part in self.parts])
        return [weight / sum(weights) for weight in weights]

    def locate(self, samples: Sequence[int] | numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return two int64 arrays [n]: corpus index of each sample, and its item in that corpus.

        Raises:
            ValueError: A sample number is negative, or too large for the dataset.
        """
        samples = numpy.asarray(samples, dtype=numpy.int64)
        if samples.size and not 0 <= samples.min() <= samples.max() < len(self):
            raise ValueError(
                f"samples {samples.min()} to {samples.max()} of a data set of {len(self)}"
            )
        if not isinstance(self.dataset, BlendedDataset):
            return numpy.zeros_like(samples), samples
        if isinstance(self.dataset, TokenBlend):
            return self.dataset.order.locate(samples)
        return (
            self.dataset.dataset_index[samples].astype(numpy.int64),
            self.dataset.dataset_sample_index[samples].astype(numpy.int64),
        )

    def lengths(self, samples: Sequence[int] | numpy.ndarray) -> numpy.ndarray:
        """Return the number of inputs of each sample's document: [n] -> [n] int64.

        No token is read.
        """
        corpora, items = self.locate(samples)
        lengths = numpy.empty_like(items)
        for corpus in numpy.unique(corpora):
            here = corpora == corpus
            lengths[here] = self.parts[corpus].lengths(items[here])
        return lengths

    def header(self, sample: int) -> str:
        """Return the comment lines before the recorded step whose first sample is ``sample``."""
        config = self.parts[0].config
        if config.mock:
            return ""
        weights = self.dataset.weights if isinstance(self.dataset, BlendedDataset) else [1.0]
        return RecordedBatch(
            sample,
            config.random_seed,
            config.sequence_length,
            config.overlong,
            TOKENS if isinstance(self.dataset, TokenBlend) else DOCUMENTS,
            tuple(p.recorded(weight) for p, weight in zip(self.parts, weights, strict=True)),
        ).header()

    def _item(self, sample: int) -> tuple[DocumentDataset, int]:
        corpora, items = self.locate([sample])
        return self.parts[int(corpora[0])], int(items[0])

    def tokens(self, sample: int, start: int = 0, stop: int | None = None) -> numpy.ndarray:
        """Return tokens [start, stop) of a sample's document as int64.

        A document with n inputs has n + 1 tokens. ``stop`` None is the end of the document.

        Raises:
            ValueError: See :meth:`locate` and :meth:`.documents.DocumentDataset.tokens`.
        """
        part, item = self._item(sample)
        return part.tokens(item, start, stop)

    def inputs(self, sample: int, start: int, stop: int) -> numpy.ndarray:
        """Return inputs [start, stop) of a sample's document as int64; see :meth:`tokens`."""
        return self.tokens(sample, start, stop)

    def targets(self, sample: int, start: int, stop: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return labels and loss mask of a sample's inputs [start, stop).

        See :meth:`.documents.DocumentDataset.targets`.
        """
        part, item = self._item(sample)
        return part.targets(item, start, stop)


class BatchDocument(NamedTuple):
    """Document of a batch: its sample number, and its number of inputs."""

    number: int
    length: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Global batch: sample numbers, and the number of inputs of each sample's document."""

    samples: numpy.ndarray  # [size] int64
    lengths: numpy.ndarray  # [size] int64

    def sample(self, document: int) -> BatchDocument:
        """Return one of the batch's documents."""
        return BatchDocument(int(self.samples[document]), int(self.lengths[document]))


def progress_of(args: Any) -> Any:
    """Return the object that counts iterations and samples.

    Later versions of Megatron (#7447) count in a state object, earlier versions in the args.
    """
    return getattr(global_vars, "get_train_state", lambda: args)()


class ScheduledSizes:
    """Function from the number of consumed samples to the size of the next training batch.

    The function uses Megatron's own calculator. The size is constant, or follows
    --step-batch-size-schedule.
    """

    def __init__(self) -> None:
        self._calculator = copy(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR)
        steps = getattr(self._calculator, "schedule", ())
        self._thresholds = sorted(samples for samples, _ in steps)

    def __call__(self, consumed: int) -> int:
        """Return the size of the batch after ``consumed`` samples."""
        self._calculator.update(consumed, consistency_check=False)
        return self._calculator.get_current_running_global_batch_size()

    def samples(self, iterations: int) -> int:
        """Return the number of samples consumed by the first ``iterations`` iterations."""
        consumed = 0
        while iterations:
            size = self(consumed)
            later = (samples - consumed for samples in self._thresholds if samples > consumed)
            count = min([iterations, *(-(-samples // size) for samples in later)])
            consumed, iterations = consumed + count * size, iterations - count
        return consumed


class GlobalBatches:
    """Iterator over the global batches, with look-ahead.

    Args:
        documents: Source of the documents.
        size: Number of samples per batch, or a function from consumed samples to this number.
        consumed: Number of samples consumed before the first batch.

    Raises:
        ValueError: The size or ``consumed`` is invalid. ``next`` raises a ValueError if fewer
            samples remain than a batch needs.
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
        """Return the next batch (``ahead`` 0), or the batch ``ahead`` batches after it.

        The method consumes no samples. It returns None if too few samples remain.
        """
        first = self.consumed
        for _ in range(ahead):
            first += self.size_after(first)
        after = first + self.size_after(first)
        if after > len(self.documents):
            return None
        samples = numpy.arange(first, after)
        return Batch(samples, self.documents.lengths(samples))


class FullPasses(GlobalBatches):
    """Repeated passes over all documents; every pass has the same ``batches`` batches.

    The class serves --full-validation. A pass contains each document once, and a batch contains at
    most ``size`` documents.
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
        """Return the next batch (``ahead`` 0), or the batch ``ahead`` batches after it."""
        number = (self._drawn + ahead) % self.batches
        samples = numpy.arange(self._bounds[number], self._bounds[number + 1])
        return Batch(samples, self.documents.lengths(samples))


class TokenBlend(BlendedDataset):
    """Megatron's blended dataset, in which each corpus's number of tokens follows its weight.

    Unlike Megatron's own class, it holds no index of its samples. Megatron's index takes 10 bytes
    per sample.
    """

    def _build_indices(self) -> tuple[None, None]:
        pairs = zip(self.datasets, self.weights, strict=True)
        self.order = TokenOrder([part.due_times(weight) for part, weight in pairs])
        return None, None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Return a sample under the keys of BlendedDataset."""
        corpora, items = self.order.locate(numpy.array([idx]))
        return {"dataset_id": corpora[0], **self.datasets[corpora[0]][items[0]]}


class DocumentBuilder(BlendedMegatronDatasetBuilder):
    """Megatron's dataset builder, which builds a :class:`TokenBlend` if weights are by tokens."""

    @staticmethod
    def build_generic_dataset(cls: Any, is_built: Callable[[], bool], *args: Any) -> Any:
        """Build a dataset of class ``cls``, or a TokenBlend if weights are by tokens."""
        if cls is BlendedDataset and _weighs_tokens(*args[1:]):
            cls = TokenBlend
        return BlendedMegatronDatasetBuilder.build_generic_dataset(cls, is_built, *args)


def _weighs_tokens(parts: list, weights: list, size: int | None, config: DocumentConfig) -> bool:
    """Return whether the user gives weights, which are fractions of tokens, and ``size`` is given.

    Without weights given by the user, Megatron weights each corpus by its number of documents. The
    corpora are then used up at the same rate.
    """
    blend = config.blend or config.blend_per_split[parts[0].index_split.value]
    return config.blend_by == TOKENS and size is not None and blend[1] is not None


def build_documents(
    config: DocumentConfig,
    sizes: Sequence[int | None],
    group: torch.distributed.ProcessGroup | None = None,
) -> list[Documents | None]:
    """Check and build the documents of training, validation and test.

    All ranks of the job must call this function.

    Args:
        config: The configuration.
        sizes: Samples requested for training, validation and test; None is one epoch.
        group: CPU group in which all ranks compare their document lengths; None: no comparison.

    Returns:
        The documents of training, validation and test; None for a split without documents.

    Raises:
        ValueError: ``check_corpora`` finds an error, or ranks have different documents.
    """
    check_corpora(config, sizes)
    if group is not None:
        require_same_documents(config, group)
    built = DocumentBuilder(DocumentDataset, list(sizes), lambda: True, config).build()

    return [None if dataset is None else Documents(dataset) for dataset in built]
