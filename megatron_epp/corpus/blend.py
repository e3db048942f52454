"""Order in which a blend draws the documents of several corpora, by their tokens.

Megatron's own data sets draw samples of equally many tokens, so that weights of samples are weights
of tokens. Documents differ in length: each comes when the middle of its tokens is due, so that at
every point the corpora have given tokens by their weights, to within one document of each.

    weights 0.5 0.5    a: documents of 2 tokens    b: documents of 6 tokens
    due (middle of the tokens so far, by weight)   a: 2 6 10 14 ...   b: 6 18 ...
    order                                          a a b a a a b ...
"""

from collections.abc import Callable, Sequence

import numpy as np

TOKENS, DOCUMENTS = BLENDS = ("tokens", "documents")  # what the weights of a blend count


def order_by_tokens(
    lengths: Sequence[Callable[[int], np.ndarray]], weights: Sequence[float], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (corpus int16, place in its corpus's order int64) of the first documents: two [size].

    A larger ``size`` has the same beginning.

    Args:
        lengths: of every corpus: tokens of its first n documents, for any n: [n], positive.
        weights: of every corpus, positive.
        size: documents to draw.
    """
    if size == 0:  # of corpora that may have no document
        return np.empty(0, np.int16), np.empty(0, np.int64)
    counts = [size // len(weights) + 1] * len(weights)
    due = [_due(*corpus) for corpus in zip(lengths, weights, counts, strict=True)]
    # What no further document of a corpus can come before.
    while sum(map(len, reached := _before(due))) < size:
        shortest = min(range(len(due)), key=lambda corpus: due[corpus][-1])
        counts[shortest] *= 2
        due[shortest] = _due(lengths[shortest], weights[shortest], counts[shortest])
    order = np.argsort(np.concatenate(reached), kind="stable")[:size]
    corpora = np.repeat(np.arange(len(due), dtype=np.int16), list(map(len, reached)))
    places = np.concatenate([np.arange(len(one), dtype=np.int64) for one in reached])
    return corpora[order], places[order]


def document_weights(weights: Sequence[float], mean_tokens: Sequence[float]) -> list[float]:
    """Return shares of documents, which sum to 1, that give tokens by ``weights``."""
    parts = [weight / mean for weight, mean in zip(weights, mean_tokens, strict=True)]
    return [part / sum(parts) for part in parts]


def _due(lengths: Callable[[int], np.ndarray], weight: float, count: int) -> np.ndarray:
    """Return when each document's middle is due, rising, and when all their tokens end: [n + 1]."""
    tokens = lengths(count).astype(np.int64)
    ends = np.cumsum(tokens)
    return np.append(ends - tokens / 2, ends[-1]) / weight


def _before(due: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return what of each corpus is due before the first of them ends."""
    end = min(one[-1] for one in due)
    return [one[: np.searchsorted(one[:-1], end)] for one in due]
