"""From options to batches of document lengths."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_epp.corpus.lengths import Corpus, distribution_names, open_corpus
from megatron_epp.show.units import tokens_text

# Documents in a batch where the user names no number: that of the published experiments.
DEFAULT_SIZE = 512
# A text file of up to this many lengths is one batch where one batch is asked for.
MOST_IN_ONE = 16_384


@dataclass(frozen=True, slots=True)
class Batches:
    """size is None where the whole file, in its order, is the one batch."""

    corpus: Corpus
    size: int | None
    seed: int

    def __getitem__(self, index: int) -> tuple[int, ...]:
        if self.size is None:
            return self.corpus.in_order()
        return self.corpus.batch(index, self.size, self.seed)

    def __str__(self) -> str:
        size = len(self.corpus) if self.size is None else self.size
        drawn = "all" if self.size is None else f"drawn with seed {self.seed}"
        return (
            f"{self.corpus.name}: {self.corpus.counts}; {size} documents a batch, {drawn}; "
            f"mean {tokens_text(self.corpus.tokens / len(self.corpus))} tokens, "
            f"longest {tokens_text(self.corpus.inputs.max())}"
        )


def open_batches(arguments: argparse.Namespace, numbers: Sequence[int]) -> Batches:
    """The batches that the options name, of which those of these ``numbers`` are wanted."""
    corpus = open_corpus(arguments.lengths, arguments.context, arguments.overlong)
    size = arguments.global_batch_size
    is_list = Path(arguments.lengths).suffix != ".idx"
    is_list = is_list and not (
        arguments.lengths in distribution_names() and not Path(arguments.lengths).is_file()
    )
    if size is None and not (is_list and list(numbers) == [0] and len(corpus) <= MOST_IN_ONE):
        size = min(DEFAULT_SIZE, len(corpus))
    return Batches(corpus, size, arguments.seed)
