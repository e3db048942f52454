"""Order in which a blend draws the documents of several corpora, by their tokens.

Megatron's own data sets draw samples of equal length, so their weights apply to samples and tokens
alike. Documents differ in length. The due time of a document is the number of tokens in its corpus
before the middle of the document, divided by the weight of the corpus. Documents are drawn by
ascending due time, so the tokens drawn from a corpus match its weight to within one document.

    weights 0.5 0.5    a: documents of 2 tokens    b: documents of 6 tokens
    due times                                      a: 2 6 10 14 ...   b: 6 18 ...
    order                                          a a b a a a b ...
"""

from collections.abc import Callable, Sequence

import numpy as np

TOKENS, DOCUMENTS = BLENDS = ("tokens", "documents")  # unit of the weights of a blend


def order_by_tokens(
    lengths: Sequence[Callable[[int], np.ndarray]], weights: Sequence[float], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays [size] for the drawn documents: corpus numbers, indices in the corpora.

    Their dtypes are int16 and int64. With a larger ``size``, the first documents are the same.

    Args:
        lengths: for each corpus, a function of n that returns an array [n]: the tokens of the first
            n documents, positive.
        weights: weight of each corpus, positive.
        size: number of documents to draw.
    """
    if size == 0:  # the corpora may be empty
        return np.empty(0, np.int16), np.empty(0, np.int64)
    counts = [size // len(weights) + 1] * len(weights)
    due = [_due(*corpus) for corpus in zip(lengths, weights, counts, strict=True)]
    # Read more until ``size`` documents are due before any document that has not been read.
    while sum(map(len, reached := _before(due))) < size:
        shortest = min(range(len(due)), key=lambda corpus: due[corpus][-1])
        counts[shortest] *= 2
        due[shortest] = _due(lengths[shortest], weights[shortest], counts[shortest])
    order = np.argsort(np.concatenate(reached), kind="stable")[:size]
    corpora = np.repeat(np.arange(len(due), dtype=np.int16), list(map(len, reached)))
    places = np.concatenate([np.arange(len(one), dtype=np.int64) for one in reached])
    return corpora[order], places[order]


def document_weights(weights: Sequence[float], mean_tokens: Sequence[float]) -> list[float]:
    """Return document weights (sum 1) for which drawn tokens are in proportion to ``weights``."""
    parts = [weight / mean for weight, mean in zip(weights, mean_tokens, strict=True)]
    return [part / sum(parts) for part in parts]


def _due(lengths: Callable[[int], np.ndarray], weight: float, count: int) -> np.ndarray:
    """Return the due times of ``count`` documents and of the end of the last one: [count + 1]."""
    tokens = lengths(count).astype(np.int64)
    ends = np.cumsum(tokens)
    return np.append(ends - tokens / 2, ends[-1]) / weight


def _before(due: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the due times of each corpus that are below the smallest last value in ``due``."""
    end = min(one[-1] for one in due)
    return [one[: np.searchsorted(one[:-1], end)] for one in due]
