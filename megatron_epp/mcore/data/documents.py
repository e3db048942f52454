"""Documents of a Megatron corpus as a dataset in which one item is one document.

Megatron's own GPTDataset concatenates the documents and cuts the result every ``seq_length``
tokens. In this dataset, each sequence of the ``.idx`` is one document. A sequence of L tokens
has L - 1 inputs ``tokens[:-1]`` with labels ``tokens[1:]``. Documents with more inputs than the
context are truncated, dropped or split (flag --epp-overlong), before documents are shuffled. The
``.idx`` contains all lengths, so the dataset knows them before it reads a token.

    tokens    a b c d e f          6 tokens of the sequence
    inputs    a b c d e            5 = the length
    labels    b c d e f
    context 2, truncate            inputs a b
    context 2, split               inputs a b | c d | e      labels b c | d e | f: no label is lost

If ``PREFIX_mask.bin/.idx`` exist next to a corpus, only tokens with mask 1 have a loss
(corpus/loss_mask.py). A document then ends at its last token with mask 1.

The order of the documents depends only on the seed (corpus/epochs.py).
"""

import argparse
import logging
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.datasets.utils import Split
from megatron.core.utils import log_single_rank

from megatron_epp.corpus.blend import BLENDS, TOKENS, DueTimes
from megatron_epp.corpus.epochs import Epochs
from megatron_epp.corpus.idx_file import (
    CorpusFiles,
    check_vocabulary,
    examine,
    examine_vocabulary,
)
from megatron_epp.corpus.loss_mask import SUFFIX as MASKS
from megatron_epp.corpus.loss_mask import LossMasks, examine_masks, index_of_split
from megatron_epp.corpus.overlong import Counts, DocumentIndex, require_policy
from megatron_epp.corpus.recorded_batch import RecordedCorpus
from megatron_epp.mcore.data.data_flags import Blend, blends_of
from megatron_epp.runtime.consensus import digest, require_same

logger = logging.getLogger(__name__)

_FILES_OF_MAPPED = 3  # that Megatron keeps open for a corpus: two mappings and the .bin
_LATER_FILES = 256  # sockets, libraries, checkpoints


@dataclass
class DocumentConfig(GPTDatasetConfig):
    """Megatron's dataset configuration with additional fields for documents.

    ``sequence_length`` is the context, the largest number of inputs of a document. The additional
    fields are described at their definitions.

    Raises:
        ValueError: ``overlong``, ``blend_by`` or ``sequence_length`` is invalid.
    """

    overlong: str = "truncate"
    """Policy for documents with more inputs than the context: truncate, drop or split."""

    blend_by: str = TOKENS
    """Unit of a blend's weights: tokens, as in Megatron's own datasets, or documents."""

    vocabulary_size: int | None = None
    """Rows of the embedding, including padding; tokens beyond raise an error. None: no check."""

    indices: dict[tuple[str, Split], DocumentIndex] = field(default_factory=dict, repr=False)
    """Document index of each (corpus, split), filled by :func:`check_corpora`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_policy(self.overlong)
        if self.blend_by not in BLENDS:
            raise ValueError(f"blend by {self.blend_by!r}: expected one of {', '.join(BLENDS)}")
        if self.sequence_length < 1:
            raise ValueError(f"context {self.sequence_length}: expected at least 1 token")


class DocumentDataset(MegatronDataset):
    """Dataset of the documents of one split of one corpus, built by Megatron's builder.

    The dataset has ``num_samples`` items, drawn from several epochs if necessary. If
    ``num_samples`` is None, it has the documents of one epoch.
    """

    def __init__(
        self,
        dataset: IndexedDataset | MockGPTLowLevelDataset,
        dataset_path: str | None,
        indices: numpy.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: DocumentConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        split = config.indices.get((dataset_path or "", index_split))
        if split is None:  # in object storage: Megatron has just fetched the index
            first = int(indices[0]) if len(indices) else 0
            ends = first, first + len(indices)
            how = config.sequence_length, config.overlong
            split = index_of_split(dataset.sequence_lengths, ends, *how)
            refuse_empty(split.counts, dataset_path, index_split, num_samples, config)
        assert split.counts.sequences == len(indices), "Megatron splits a corpus otherwise"
        self.index = split
        self._masks = None
        if split.masks is not None:
            self._masks = IndexedDataset(split.masks, mmap=config.mmap_bin_files)
        self._epochs = Epochs(split.counts.documents, config.random_seed)

    @staticmethod
    def numel_low_level_dataset(
        low_level_dataset: IndexedDataset | MockGPTLowLevelDataset,
    ) -> int:
        """Return the number of sequences in the corpus, which Megatron divides into splits."""
        return low_level_dataset.sequence_lengths.shape[0]

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: DocumentConfig
    ) -> IndexedDataset | MockGPTLowLevelDataset:
        """Open the corpus, which ``check_corpora`` has already checked.

        Without a path, return Megatron's mock data: 100,000 documents of 1 to 4,095 tokens.
        """
        if dataset_path is None:
            return MockGPTDataset.build_low_level_dataset(None, config)
        return GPTDataset.build_low_level_dataset(dataset_path, config)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MegatronDataset._key_config_attributes(), "overlong"]

    @property
    def counts(self) -> Counts:
        """Counts of the split's sequences and documents."""
        return self.index.counts

    def __len__(self) -> int:
        return self.counts.documents if self.num_samples is None else self.num_samples

    def documents(self, items: Sequence[int] | numpy.ndarray) -> numpy.ndarray:
        """Return the document number of each item, an index into ``self.index``: [n] int64."""
        return self._epochs.documents(items)

    def lengths(self, items: Sequence[int] | numpy.ndarray) -> numpy.ndarray:
        """Return the number of inputs of each item's document: [n] -> [n] int64.

        No token is read.
        """
        return self.index.inputs[self.documents(items)].astype(numpy.int64)

    def due_times(self, weight: float) -> DueTimes:
        """Return when the documents are due in a blend with this ``weight``."""
        return DueTimes(self.index.inputs, self._epochs.order, weight)

    @cached_property
    def mean_length(self) -> float:
        """Mean number of inputs per document of an epoch."""
        return int(self.index.inputs.sum(dtype=numpy.int64)) / self.counts.documents

    def recorded(self, weight: float) -> RecordedCorpus:
        """Return the corpus for the header of recorded steps; ``weight`` is that in the blend."""
        path, first = self.dataset_path or "", int(self.indices[0])
        lengths = self.dataset.sequence_lengths
        return RecordedCorpus(
            first,
            first + len(self.indices),
            len(lengths),
            int(lengths.sum(dtype=numpy.int64)),
            weight,
            path if is_object_storage_path(path) else os.path.abspath(path),
        )

    def length(self, item: int) -> int:
        """Return the number of inputs of one item's document."""
        return int(self.lengths([item])[0])

    def tokens(self, item: int, start: int = 0, stop: int | None = None) -> numpy.ndarray:
        """Return an int64 array with tokens [start, stop) of the document of sample ``item``.

        A document with ``length`` inputs has ``length + 1`` tokens. The inputs of a span [a, b) are
        tokens [a, b), and the labels of the span are tokens [a + 1, b + 1). The method reads only
        the requested tokens.

        Args:
            item: Index of the sample.
            start: Index of the first token to return.
            stop: Index after the last token to return; None is the end of the document.

        Raises:
            ValueError: The span lies outside of the document, or a token read from the corpus is
                not in [0, ``config.vocabulary_size``).
        """
        document = int(self.documents([item])[0])
        tokens_there = int(self.index.inputs[document]) + 1
        stop = tokens_there if stop is None else stop
        if not 0 <= start <= stop <= tokens_there:
            raise ValueError(
                f"tokens [{start}:{stop}] of item {item}, which has {tokens_there} tokens"
            )
        if start == stop:
            return numpy.empty(0, numpy.int64)
        read = self.dataset.get(
            int(self.index.sequences[document]),
            offset=int(self.index.starts[document]) + start,
            length=stop - start,
        )
        if self.config.vocabulary_size is not None:
            check_vocabulary(read, self.config.vocabulary_size, f"{self.dataset_path}.bin")
        return read.astype(numpy.int64)

    def loss_mask(self, inputs: numpy.ndarray, labels: numpy.ndarray) -> numpy.ndarray:
        """Return the loss mask [n] of ``labels`` [n] as float32, by the rules of GPTDataset.

        The mask is 0 where the label is the tokenizer's padding token. With --eod-mask-loss, the
        mask is also 0 where the *input* is the end-of-document token, because the label is then a
        token of another document. Elsewhere, the mask is 1, also for end-of-document labels.
        """
        mask = numpy.ones(len(inputs), numpy.float32)
        if self.config.eod_mask_loss:
            mask[inputs == self.config.tokenizer.eod] = 0.0
        mask[labels == self._pad_token_id] = 0.0
        return mask

    def targets(self, item: int, start: int, stop: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return labels (int64) and loss mask (float32) of an item's inputs [start, stop).

        Both have the shape [stop - start]. The last label is token ``stop`` of the document. If the
        corpus has a loss mask, the returned mask is multiplied by it.

        Raises:
            ValueError: See :meth:`tokens`.
        """
        tokens = self.tokens(item, start, stop + 1)
        mask = self.loss_mask(tokens[:-1], tokens[1:])
        if self._masks is not None and start < stop:
            document = int(self.documents([item])[0])
            mask *= self._masks.get(
                int(self.index.sequences[document]),
                offset=int(self.index.starts[document]) + start + 1,
                length=stop - start,
            )
        return tokens[1:], mask

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Return the full document under the keys of GPTDataset, for Megatron's own schedules."""
        length = self.length(int(idx))
        labels, loss_mask = self.targets(int(idx), 0, length)
        return {
            "tokens": torch.from_numpy(self.tokens(int(idx), 0, length)),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.arange(length, dtype=torch.int64),
        }


def refuse_empty(
    counts: Counts,
    prefix: str | None,
    split: Split,
    num_samples: int | None,
    config: DocumentConfig,
) -> None:
    """Raise a ValueError if a split has no usable document, unless 0 samples are requested.

    Args:
        counts: Counts of the split's sequences and documents.
        prefix: Path of the corpus, for the error message.
        split: The split, for the error message.
        num_samples: Number of requested samples; None is one epoch.
        config: The configuration. The error message contains its context.
    """
    if counts.documents or num_samples == 0:
        return
    why = f"{counts.sequences} sequences fall to it"
    if counts.skipped:
        why += f", {counts.skipped} have fewer than 2 tokens"
    if counts.untargeted:
        why += f", {counts.untargeted} have no target within {config.sequence_length} tokens"
    if counts.dropped:
        why += f", {counts.dropped} are dropped for exceeding {config.sequence_length} tokens"
    remedy = "use a larger corpus, or give this split more with --split"
    if counts.dropped:
        remedy += ", or truncate or split overlong documents"
    raise ValueError(f"{prefix}: no usable document for {split.name}: {why}; {remedy}")


def config_from_args(
    args: argparse.Namespace,
    tokenizer: Any,
    overlong: str,
    vocabulary_size: int | None,
    chats: Mapping[str, str] | None = None,
    blend_by: str = TOKENS,
) -> DocumentConfig:
    """Return the configuration that Megatron's data flags describe.

    Args:
        args: Megatron's parsed flags.
        tokenizer: A Megatron tokenizer.
        overlong: Policy for overlong documents: truncate, drop or split.
        vocabulary_size: Rows of the embedding; None disables the check of the tokens.
        chats: Path of each chat file -> prefix of its converted corpus (chat_cache.py); None
            without chat files.
        blend_by: Unit of a blend's weights: tokens or documents.

    Raises:
        ValueError: No corpus is given, the blend or another setting is invalid, or a flag skips
            reading the .idx files.
    """
    for flag in (
        "dataloader_fast_cache_load",
        "dataloader_defer_npy_index_mmap",
        "per_dataset_sequences_path",
    ):
        if getattr(args, flag, None):
            raise ValueError(
                f"--{flag.replace('_', '-')} skips the reading of the .idx, where the documents' "
                "lengths are; remove it with --epp"
            )
    blend, blend_per_split = blends_of(args)
    if not (blend or blend_per_split or args.mock_data):
        raise ValueError("no documents to train on: give --data-path, or --train-data-path")
    if chats:
        blend = _in_place_of(chats, blend)
        blend_per_split = blend_per_split and [_in_place_of(chats, one) for one in blend_per_split]
    fields: dict[str, Any] = {
        **dataset_fields(args, tokenizer),
        "blend": blend,
        "blend_per_split": blend_per_split,
        # Every document has its own positions and attention, so these flags have no effect.
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "create_attention_mask": False,
    }
    return DocumentConfig(
        **fields,
        overlong=overlong,
        blend_by=blend_by,
        vocabulary_size=vocabulary_size,
    )


def dataset_fields(args: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """Return the fields of Megatron's GPTDatasetConfig that ``args`` set for every dataset."""
    return {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "object_storage_cache_path": args.object_storage_cache_path,
        "tokenizer": tokenizer,
        "eod_mask_loss": args.eod_mask_loss,
        "allow_ambiguous_pad_tokens": args.allow_ambiguous_pad_tokens,
    }


def _in_place_of(chats: Mapping[str, str], blend: Blend | None) -> Blend | None:
    return blend and ([chats.get(path, path) for path in blend[0]], blend[1])


def check_corpora(config: DocumentConfig, sizes: Sequence[int | None]) -> None:
    """Check the corpora before Megatron builds datasets, and fill ``config.indices``.

    Every rank calls this function, so that all ranks fail together. Megatron builds datasets on
    rank 0 first, and the other ranks would block if only rank 0 failed. Rank 0 warns about corpora
    that are split into sentences. The function does not check corpora in object storage.

    Args:
        config: The configuration.
        sizes: Samples requested for training, validation and test; None is one epoch.

    Raises:
        ValueError: A file is damaged or is not a corpus, a split has no usable document, tokens
            exceed the vocabulary, or the corpora need more open files than a process may have.
    """
    _allow_open_files(config, sizes)
    examined: dict[str, tuple[CorpusFiles, LossMasks | None]] = {}
    for prefix, split, (begin, end), size in _shares(config, sizes):
        if is_object_storage_path(prefix):
            continue  # Megatron fetches the index when it opens the corpus
        if prefix.endswith((".jsonl", ".json")):
            raise ValueError(f"{prefix}: no corpus; to train on a file of chats give --sft as well")
        if prefix not in examined:
            files = examine(prefix)
            examined[prefix] = files, examine_masks(files)
            if config.vocabulary_size is not None:
                examine_vocabulary(files, config.vocabulary_size)
            if files.is_split_into_sentences:
                log_single_rank(
                    logger,
                    logging.WARNING,
                    f"{prefix}: {files.sequences} sequences in {files.documents} documents, so it "
                    "was split into sentences, and every sentence is a document here; prepare it "
                    "without --split-sentences",
                )
        files, masks = examined[prefix]
        lengths = files.lengths
        # The sequence numbers that Megatron's builder gives to this split.
        sequences = round(begin * len(lengths)), round(end * len(lengths))
        how = config.sequence_length, config.overlong
        index = index_of_split(lengths, sequences, *how, masks)
        refuse_empty(index.counts, prefix, split, size, config)
        config.indices[prefix, split] = index


def _allow_open_files(config: DocumentConfig, sizes: Sequence[int | None]) -> None:
    """Raise this process's limit of open files as far as the corpora need.

    Raises:
        ValueError: The hard limit is too low.
    """
    local = [one for one, *_ in _shares(config, sizes) if not is_object_storage_path(one)]
    masked = sum(Path(f"{prefix}{MASKS}.idx").is_file() for prefix in local)  # opened by each split
    corpora = len(set(local))
    files = (corpora + masked) * (_FILES_OF_MAPPED if config.mmap_bin_files else 1)
    needed = files + len(os.listdir("/dev/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and needed > hard:
        raise ValueError(
            f"{corpora} corpora need {needed} open files in each process; the hard limit is {hard} "
            "(ulimit -Hn): raise it, or give fewer corpora"
        )
    wanted = needed + _LATER_FILES
    wanted = wanted if hard == unlimited else min(wanted, hard)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def require_same_documents(config: DocumentConfig, group: torch.distributed.ProcessGroup) -> None:
    """Compare the document lengths on all ranks of ``group``, a CPU group.

    All ranks of ``group`` must call this function. Nodes without a shared file system read their
    own copies of the files. Without this check, a difference would cause an error only when
    training reaches the document. The function does not compare tokens.

    Raises:
        ValueError: Ranks have different corpora or document lengths; the message names the ranks.
    """
    facts = {"--data-path": repr([(prefix, split.name) for prefix, split in config.indices])}
    for (prefix, split), index in config.indices.items():
        masked = repr(index.masks is not None).encode()
        lengths = map(numpy.ascontiguousarray, (index.sequences, index.starts, index.inputs))
        facts[f"{prefix}: the documents for {split.name}"] = (
            f"{index.counts.documents} with lengths of digest {digest(masked, *lengths).hex()[:16]}"
        )
    require_same(
        facts, group, "the same on every node: copy one .bin and .idx (and their masks) to each"
    )


def _shares(
    config: DocumentConfig, sizes: Sequence[int | None]
) -> Iterator[tuple[str, Split, tuple[float, float], int | None]]:
    """Yield (prefix, split, (begin, end) as fractions of the corpus, samples) of every dataset."""
    for split in Split if not config.mock else ():
        if config.blend is not None:
            blend, split_range = config.blend, config.split_matrix[split.value]
        else:
            blend, split_range = config.blend_per_split[split.value], (0.0, 1.0)
        if blend is None or split_range is None:
            continue
        prefixes, weights = blend
        # Several corpora without weights are mixed as they are, one epoch of each.
        size = None if weights is None and len(prefixes) > 1 else sizes[split.value]
        for prefix in prefixes:
            yield prefix, split, split_range, size
