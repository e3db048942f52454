"""Header of a recorded step: corpora and order from which training drew the documents of a batch.

    # batch: from sample 12, seed 1234, context 4096, overlong truncate, blend by tokens
    # corpus: sequences 0:990 of 1000, 45678 tokens, weight 0.3, /data/a
    # corpus: sequences 0:1980 of 2000, 912345 tokens, weight 0.7, /data/b
    step v1

Document d of the global batch is sample 12 + d of training. Of the 1000 sequences of ``/data/a``,
990 are in the training split (--split).
"""

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import takewhile

import numpy as np

from megatron_epp.corpus.blend import BLENDS, TOKENS, DocumentOrder, DueTimes, TokenOrder
from megatron_epp.corpus.epochs import Epochs
from megatron_epp.corpus.idx_file import CorpusFiles, examine, token_reader
from megatron_epp.corpus.loss_mask import examine_masks, index_of_split
from megatron_epp.corpus.overlong import OVERLONG, DocumentIndex

_BATCH = "# batch: from sample {}, seed {}, context {}, overlong {}, blend by {}"
_CORPUS = "# corpus: sequences {}:{} of {}, {} tokens, weight {}, {}"
_NUMBER = "(0|[1-9][0-9]{0,14})"
_WORDS = [f"({'|'.join(words)})" for words in (OVERLONG, BLENDS)]
_BATCH_LINE = re.compile(_BATCH.format(*[_NUMBER] * 3, *_WORDS))
_CORPUS_LINE = re.compile(_CORPUS.format(*[_NUMBER] * 4, "([0-9.e-]+)", "(.+)"))


@dataclass(frozen=True, slots=True)
class RecordedCorpus:
    """Corpus of a recorded batch.

    Attributes:
        first: number of the first sequence of the training split.
        stop: number after the last sequence of the training split.
        sequences: number of sequences of the corpus.
        tokens: number of tokens of the corpus.
        weight: weight in the blend; the weights of all corpora sum to 1.
        prefix: path without suffix.
    """

    first: int
    stop: int
    sequences: int
    tokens: int
    weight: float
    prefix: str


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """Facts that determine the documents of a batch.

    Attributes:
        sample: number of the batch's first sample.
        seed: seed of the shuffle.
        context: maximum number of input tokens of a document.
        overlong: policy for longer documents (overlong.py).
        blend: unit of the weights, tokens or documents (blend.py).
        corpora: corpora of the blend.
    """

    sample: int
    seed: int
    context: int
    overlong: str
    blend: str
    corpora: tuple[RecordedCorpus, ...]

    def header(self) -> str:
        """Return the comment lines before the step; empty for a path that is not one line."""
        *facts, _ = astuple(self)
        lines = [_BATCH.format(*facts), *(_CORPUS.format(*astuple(one)) for one in self.corpora)]
        return "\n".join([*lines, ""]) if "".join(lines).isprintable() else ""

    @classmethod
    def parse(cls, text: str) -> "RecordedBatch | None":
        """Return the facts in the comment lines at the beginning of ``text``; None without them."""
        lines = list(takewhile(lambda line: line.startswith("#"), text.splitlines()))
        batch = next(filter(None, map(_BATCH_LINE.fullmatch, lines)), None)
        corpora = tuple(
            RecordedCorpus(int(m[1]), int(m[2]), int(m[3]), int(m[4]), float(m[5]), m[6])
            for m in filter(None, map(_CORPUS_LINE.fullmatch, lines))
        )
        if batch is None or not corpora or not all(0 < one.weight <= 1 for one in corpora):
            return None
        return cls(int(batch[1]), int(batch[2]), int(batch[3]), batch[4], batch[5], corpora)


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a document in a corpus.

    Attributes:
        corpus: corpus that holds the document.
        sequence: number of the sequence in the ``.idx``.
        start: index, in the sequence, of the document's first token.
        inputs: number of input tokens.
    """

    corpus: CorpusFiles
    sequence: int
    start: int
    inputs: int

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of the document: [stop - start] int64."""
        return token_reader(self.corpus)(self.sequence, self.start + start, self.start + stop)


def locate(batch: RecordedBatch, prefixes: Sequence[str], count: int) -> list[Place]:
    """Return the places of the first ``count`` documents of a recorded batch.

    Args:
        batch: header of the recorded step.
        prefixes: paths without suffix, in the order of the corpora of ``batch``.
        count: number of documents.

    Raises:
        ValueError: a corpus cannot be read, or is not the recorded one.
    """
    pairs = zip(prefixes, batch.corpora, strict=True)
    opened = [_open(prefix, corpus, batch) for prefix, corpus in pairs]
    weights = [corpus.weight for corpus in batch.corpora]
    corpora, items = np.zeros(count, np.int64), batch.sample + np.arange(count)
    if len(opened) > 1 and batch.blend == TOKENS:
        due = [
            DueTimes(index.inputs, epochs.order, weight)
            for (_, index, epochs), weight in zip(opened, weights, strict=True)
        ]
        corpora, items = TokenOrder(due).locate(items)
    elif len(opened) > 1:
        corpora, items = DocumentOrder(weights).locate(items)
    places = []
    for corpus, item in zip(corpora.tolist(), items.tolist(), strict=True):
        files, index, epochs = opened[corpus]
        (document,) = epochs.documents([item]).tolist()
        sequence, start = int(index.sequences[document]), int(index.starts[document])
        places.append(Place(files, sequence, start, int(index.inputs[document])))
    return places


def _open(
    prefix: str, recorded: RecordedCorpus, batch: RecordedBatch
) -> tuple[CorpusFiles, DocumentIndex, Epochs]:
    """Return the corpus, and the documents of its training split and their order."""
    files = examine(prefix)
    if (files.sequences, files.tokens) != (recorded.sequences, recorded.tokens):
        raise ValueError(
            f"{prefix}.idx: {files.sequences} sequences of {files.tokens} tokens; the batch was "
            f"drawn from {recorded.sequences} of {recorded.tokens} ({recorded.prefix}); expected "
            "the --data-path of training, with its corpora in the same order"
        )
    split, masks = (recorded.first, recorded.stop), examine_masks(files)
    index = index_of_split(files.lengths, split, batch.context, batch.overlong, masks)
    if not index.counts.documents:
        raise ValueError(f"{prefix}: sequences {split[0]}:{split[1]} have no usable document")
    return files, index, Epochs(index.counts.documents, batch.seed)
