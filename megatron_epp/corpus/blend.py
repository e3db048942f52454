"""Order in which a blend draws the documents of several corpora, by their tokens.

Megatron's own data sets draw samples of equal length, so their weights apply to samples and tokens
alike. Documents differ in length. The due time of a document is the number of tokens in its corpus
before the middle of the document, divided by the weight of the corpus. Documents are drawn by
ascending due time, so the tokens drawn from a corpus match its weight to within one document.

    weights 0.5 0.5    a: documents of 2 tokens    b: documents of 6 tokens
    due times                                      a: 2 6 10 14 ...   b: 6 18 ...
    order                                          a a b a a a b ...

The order is computed in blocks, so a job with many iterations starts as fast as one with few. All
epochs of a corpus have the same number of tokens, so the place of a document in the order follows
from the number of complete epochs before it and from one permutation.
"""

from collections.abc import Callable, Sequence

import numpy as np

TOKENS, DOCUMENTS = BLENDS = ("tokens", "documents")  # unit of the weights of a blend

_BLOCK = 1 << 12  # most documents of a block of the order, unless there are many corpora
_KEPT = 1 << 18  # documents of the blocks that are kept: the batches that are read and planned
_STRIDE = 1 << 10  # documents of an epoch between two known due times
_MOST_READ = 1 << 20  # lengths that are read together


def document_weights(weights: Sequence[float], mean_tokens: Sequence[float]) -> list[float]:
    """Return document weights (sum 1) for which drawn tokens are in proportion to ``weights``."""
    parts = [weight / mean for weight, mean in zip(weights, mean_tokens, strict=True)]
    return [part / sum(parts) for part in parts]


class DueTimes:
    """Due times of the documents of one corpus, in the order of its epochs.

    Args:
        tokens: [documents] number of tokens of every document, positive.
        order: function that returns the permutation [documents] of the documents in a given epoch.
        weight: weight of the corpus, positive.
    """

    def __init__(self, tokens: np.ndarray, order: Callable[[int], np.ndarray], weight: float):
        self._tokens, self._order, self._weight = tokens, order, weight
        self._per_epoch = int(tokens.sum(dtype=np.int64))
        # By epoch: tokens of the epoch before every _STRIDE-th document.
        self._before: dict[int, np.ndarray] = {}

    @property
    def documents(self) -> int:
        """Number of documents of an epoch."""
        return len(self._tokens)

    @property
    def rate(self) -> float:
        """Documents due per unit of time, on average."""
        return self._weight * self.documents / self._per_epoch

    def count(self, time: float) -> int:
        """Return the number of documents that are due before ``time``."""
        epoch = int(time * self._weight // self._per_epoch)
        # Whole strides around the place, because the products here are rounded.
        inside = time * self._weight - epoch * self._per_epoch
        stride = int(np.searchsorted(self._tokens_before(epoch), inside))
        first = max(0, stride - 2) * _STRIDE
        due = self._due_in(epoch, first, min(self.documents, (stride + 1) * _STRIDE))
        return epoch * self.documents + first + int(np.searchsorted(due, time))

    def due(self, first: int, stop: int) -> np.ndarray:
        """Return the due times of documents [first, stop), counted over all epochs."""
        parts = [np.empty(0)]
        while first < stop:
            epoch, place = divmod(first, self.documents)
            end = min(self.documents, place + stop - first)
            parts.append(self._due_in(epoch, place, end))
            first += end - place
        return np.concatenate(parts)

    def _due_in(self, epoch: int, first: int, stop: int) -> np.ndarray:
        """Return the due times of documents [first, stop) of an epoch."""
        stride = first // _STRIDE
        documents = self._order(epoch)[stride * _STRIDE : stop]
        tokens = self._tokens[documents].astype(np.int64)
        before = epoch * self._per_epoch + self._tokens_before(epoch)[stride]
        middles = before + np.cumsum(tokens) - tokens / 2
        return middles[first - stride * _STRIDE :] / self._weight

    def _tokens_before(self, epoch: int) -> np.ndarray:
        """Return the tokens of an epoch before every ``_STRIDE``-th document, and the next."""
        if epoch not in self._before:
            order, sums = self._order(epoch), [np.zeros(1, np.int64)]
            for first in range(0, len(order), _MOST_READ):
                tokens = self._tokens[order[first : first + _MOST_READ]]
                places = np.arange(0, len(tokens), _STRIDE)
                sums.append(np.add.reduceat(tokens, places, dtype=np.int64))
            self._before = {e: old for e, old in self._before.items() if abs(e - epoch) <= 1}
            self._before[epoch] = np.cumsum(np.concatenate(sums))
        return self._before[epoch]


class TokenOrder:
    """Order in which a blend draws documents.

    Args:
        corpora: due times of the documents of each corpus.
    """

    def __init__(self, corpora: Sequence[DueTimes]):
        self._corpora = corpora
        # At most an epoch; but corpora may have documents that are due together, one each.
        documents = sum(one.documents for one in corpora)
        self._block = max(min(_BLOCK, documents), 4 * len(corpora))
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return two int64 arrays [n]: the corpus of each sample, and its index in that corpus.

        Args:
            samples: places in the order, from 0: [n].
        """
        numbers, places = np.divmod(samples, self._block)
        corpora, items = np.empty(len(samples), np.int64), np.empty(len(samples), np.int64)
        for number in set(numbers.tolist()):
            here = numbers == number
            of_corpora, of_items = self._in_block(number)
            corpora[here], items[here] = of_corpora[places[here]], of_items[places[here]]
        return corpora, items

    def _in_block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return corpora and indices of the samples of one block: [block] each."""
        if number not in self._blocks:
            start = number * self._block
            firsts = self._counts_at(start)
            stops = self._counts_at(start + self._block + self._block // 2)
            ranges = list(zip(self._corpora, firsts, stops, strict=True))
            due = np.concatenate([one.due(first, stop) for one, first, stop in ranges])
            begin = start - sum(firsts)
            order = np.argsort(due, kind="stable")[begin : begin + self._block]
            sizes = [stop - first for _, first, stop in ranges]
            corpora = np.repeat(np.arange(len(ranges), dtype=np.int16), sizes)
            items = np.concatenate([np.arange(first, stop) for _, first, stop in ranges])
            if len(self._blocks) * self._block >= _KEPT:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = corpora[order], items[order]
        return self._blocks[number]

    def _counts_at(self, sample: int) -> list[int]:
        """Return the documents of each corpus that are due before some time.

        The time is one before which ``sample`` documents are due, or at most half a block fewer.
        """
        rate = sum(one.rate for one in self._corpora)
        slack = self._block // 2
        low, high = 0.0, np.inf
        time = max(0.0, (sample - slack / 2) / rate)
        while True:
            counts = [one.count(time) for one in self._corpora]
            total = sum(counts)
            if sample - slack <= total <= sample:
                return counts
            if total > sample:
                high = time
            else:
                low = time
            time += (sample - slack / 2 - total) / rate
            if not low < time < high:
                time = (low + high) / 2


class DocumentOrder:
    """Order in which Megatron's own blended dataset draws, for weights of documents.

    The next document comes from the corpus that is furthest below its weight.

    Args:
        weights: weights of the corpora, which sum to 1.
    """

    def __init__(self, weights: Sequence[float]):
        self._weights = list(weights)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return two int64 arrays [n]: the corpus of each sample, and its index in that corpus.

        The time of a call is proportional to the largest sample.

        Args:
            samples: places in the order, ascending and without gaps: [n].
        """
        drawn, order = [0] * len(self._weights), []
        for sample in range(int(samples[-1]) + 1):
            # The arithmetic of build_blending_indices in megatron/core/datasets/helpers.cpp
            missing = [w * max(sample, 1) - n for w, n in zip(self._weights, drawn, strict=True)]
            corpus = missing.index(max(missing))
            if sample >= samples[0]:
                order.append((corpus, drawn[corpus]))
            drawn[corpus] += 1
        corpora, items = np.array(order, np.int64).T
        return corpora, items
