"""Prefixes that documents share, found in their tokens.

With D MTP layers, each token predicts the 1 + D tokens after it. Two documents share a token only
if they also share all tokens that it predicts. A prefix therefore ends 1 + D tokens before the
first token that differs:

    a b c d e        D = 0: a and b are shared, but not c, which predicts d or x
    a b c x
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megatron_epp.corpus.overlong import DocumentIndex
from megatron_epp.corpus.shared_prefixes import PrefixForest, shared_prefixes

# From a document, stop and end to its tokens [0, stop) and labels [0, end)
InputsAndLabels = Callable[[int, int, int], tuple[np.ndarray, np.ndarray]]
# From a sequence, start and stop to its tokens [start, stop)
SequenceTokens = Callable[[int, int, int], np.ndarray]


def token_prefixes(
    lengths: Sequence[int], read: InputsAndLabels, least: int, depths: int = 0
) -> PrefixForest:
    """Return the forest of documents that share prefixes of at least ``least`` tokens.

    Documents whose first ``least`` tokens are equal are read to their ends. Of other documents, at
    most these tokens and their labels are read.

    Args:
        lengths: number of inputs of each document.
        read: function (document, stop, end) -> (inputs [0, stop), labels [0, end)) of the document.
            Neither ``stop`` nor ``end`` exceeds the document's number of inputs.
        least: minimum number of tokens of a shared prefix.
        depths: number of MTP layers.
    """
    alike: dict[bytes | int, list[int]] = {}
    for number, length in enumerate(lengths):
        known = length >= least
        key = _rows(read, number, length, least, depths).tobytes() if known else number
        alike.setdefault(key, []).append(number)
    forests = []
    for group in alike.values():
        if len(group) > 1:
            rows = [_rows(read, one, lengths[one], lengths[one], depths) for one in group]
            forests.append(shared_prefixes(rows, least))
        else:
            forests.append(PrefixForest.apart([lengths[group[0]]]))
    places = {number: place for place, number in enumerate(chain(*alike.values()))}
    return PrefixForest.joined(forests).of([places[number] for number in range(len(lengths))])


def _rows(read: InputsAndLabels, document: int, length: int, stop: int, depths: int) -> np.ndarray:
    """Return tokens [0, stop) and the 1 + D tokens after each: [stop, 2 + D] int32."""
    rows = np.full((stop, 2 + depths), -1, np.int32)  # -1 after the document
    rows[:, 0], labels = read(document, stop, min(stop + depths, length))
    for depth in range(1 + depths):
        after = labels[depth : depth + stop]
        rows[: len(after), 1 + depth] = after
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class CorpusTokens:
    """Tokens of the documents of a corpus.

    Attributes:
        index: places of the documents in their sequences.
        opened: function that gets the numbers of some sequences and returns a reader of their
            tokens. A sequence has one token after its last input.
    """

    index: DocumentIndex
    opened: Callable[[Sequence[int]], SequenceTokens]

    def forest(self, documents: np.ndarray, least: int, depths: int) -> PrefixForest:
        """Return ``documents`` (numbers) with their shared prefixes, as :func:`token_prefixes`."""
        sequences, starts, lengths = (
            column[documents].tolist()
            for column in (self.index.sequences, self.index.starts, self.index.inputs)
        )
        tokens_of = self.opened(sequences)

        def read(place: int, stop: int, end: int) -> tuple[np.ndarray, np.ndarray]:
            start = starts[place]
            tokens = tokens_of(sequences[place], start, start + max(stop, end + 1))
            return tokens[:stop], tokens[1 : end + 1]

        return token_prefixes(lengths, read, least, depths)
