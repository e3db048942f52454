"""Batches of document lengths from the options."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_epp.cli.progress import bar, doing
from megatron_epp.corpus.idx_file import examine
from megatron_epp.corpus.lengths import MOST_LENGTH, Corpus, distribution_names, open_corpus
from megatron_epp.corpus.shared_prefixes import Batch, lengths_of
from megatron_epp.corpus.text_lengths import SUFFIXES
from megatron_epp.planner.choose import FIRST_BATCHES
from megatron_epp.show.units import tokens_text

# Default number of documents of a batch, as in the published experiments.
DEFAULT_SIZE = 512
# A text file with at most this many lengths is one batch, if one batch is requested.
MOST_IN_ONE = 16_384
# With this many tokens, in documents that an index can hold (32 bits), the number of query-key
# pairs fits 64 bits.
MOST_TOKENS = 2**32


def require_batch(lengths: Sequence[int], where: str) -> None:
    """Raise a ValueError if a length, or the sum of ``lengths``, is above its limit."""
    if lengths and max(lengths) > MOST_LENGTH:
        raise ValueError(
            f"{where}: a document of {max(lengths)} inputs; expected at most {MOST_LENGTH}, "
            "as in an .idx"
        )
    if sum(lengths) > MOST_TOKENS:
        raise ValueError(
            f"{where}: {sum(lengths)} inputs in {len(lengths)} documents; expected at most "
            f"{MOST_TOKENS} in a batch; give a smaller --global-batch-size or --context"
        )


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of a corpus.

    Attributes:
        corpus: the corpus.
        size: number of documents in a batch; None: the only batch is all documents in file order.
        seed: seed of the shuffle.
        share_from: minimum number of equal tokens of a shared prefix; None: tokens are not read.
        depths: number of MTP layers.
    """

    corpus: Corpus
    size: int | None
    seed: int
    share_from: int | None
    depths: int

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(lengths_of(self._drawn(index)))

    def _drawn(self, index: int) -> Batch:
        batch = self.corpus.documents(index, self.size, self.seed)
        require_batch(lengths_of(batch), f"{self.corpus.name}: batch {index}")
        return batch

    @property
    def has_prefixes(self) -> bool:
        """Whether documents may have shared prefixes."""
        return bool(self.corpus.groups) or self.share_from is not None

    def forest(self, index: int) -> Batch:
        """Return batch ``index`` with the prefixes that its documents share, if any."""
        batch = self._drawn(index)
        if self.share_from is None:
            return batch
        how = self.share_from, self.depths
        return self.corpus.sharing(index, self.size, self.seed, *how)

    @property
    def first(self) -> list[tuple[int, ...]]:
        """First batches of the corpus: training chooses the layout from the same batches."""
        return [*map(self.__getitem__, self._first)]

    @property
    def first_forests(self) -> list[Batch]:
        """First batches, as :attr:`first`, with the prefixes that their documents share."""
        return [*map(self.forest, self._first)]

    @property
    def _first(self) -> range:
        return range(1 if self.size is None else FIRST_BATCHES)

    def __str__(self) -> str:
        size = len(self.corpus) if self.size is None else self.size
        drawn = "all" if self.size is None else f"drawn with seed {self.seed}"
        shared = f"equal beginnings of at least {self.share_from} tokens are shared; "
        shared = "" if self.share_from is None else shared
        return (
            f"{self.corpus.name}: {self.corpus.note}{'; ' * bool(self.corpus.note)}"
            f"{self.corpus.counts}; {size} documents a batch, {drawn}; {shared}"
            f"mean {tokens_text(self.corpus.tokens / len(self.corpus))} tokens, "
            f"longest {tokens_text(self.corpus.inputs.max())}"
        )


def open_batches(arguments: argparse.Namespace, numbers: Sequence[int], depths: int = 0) -> Batches:
    """Return the batches of the corpus.

    Args:
        arguments: options of the command.
        numbers: numbers of the batches that the command uses.
        depths: number of MTP layers.

    Raises:
        ValueError: the corpus cannot be used, or has no tokens for --share-from.
    """
    how = arguments.context, arguments.overlong, arguments.tokenizer, bar
    with doing("reading the corpus"):
        corpus = open_corpus(arguments.lengths, *how)
    share_from = getattr(arguments, "share_from", None)  # tune has no such option
    if share_from is not None and corpus.document_tokens is None:
        raise ValueError(
            f"--share-from: no tokens of {arguments.lengths} are known; expected a Megatron .idx "
            "with its .bin, or texts or chats with --tokenizer"
        )
    if share_from is not None and Path(arguments.lengths).suffix == ".idx":
        examine(arguments.lengths.removesuffix(".idx"))  # the .bin
    size = arguments.global_batch_size
    is_list = Path(arguments.lengths).suffix not in (".idx", *SUFFIXES)
    is_list = is_list and not (
        arguments.lengths in distribution_names() and not Path(arguments.lengths).is_file()
    )
    if size is None and not (is_list and list(numbers) == [0] and len(corpus) <= MOST_IN_ONE):
        size = min(DEFAULT_SIZE, len(corpus))
    return Batches(corpus, size, arguments.seed, share_from, depths)
