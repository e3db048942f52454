"""Documents of several corpora in the order that gives tokens by weights."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy
import pytest

from megatron_epp.corpus import blend
from megatron_epp.corpus.blend import DueTimes, TokenOrder, document_weights
from megatron_epp.corpus.epochs import epoch_order

# ------------------------------------------------------------------ small blends


def corpus(*lengths: int):
    """Tokens of the first n documents of a corpus that is read over and over."""
    return lambda count: numpy.resize(numpy.array(lengths), count)


def order_of(lengths: Sequence[Sequence[int]], weights: Sequence[float]) -> TokenOrder:
    """The order of corpora whose documents come in the same order in every epoch."""
    tokens = [numpy.array(one) for one in lengths]
    return TokenOrder(
        [
            DueTimes(one, lambda epoch, one=one: numpy.arange(len(one)), weight)
            for one, weight in zip(tokens, weights, strict=True)
        ]
    )


def drawn(lengths: Sequence[Sequence[int]], weights: Sequence[float], size: int) -> list:
    corpora, places = order_of(lengths, weights).locate(numpy.arange(size))
    return list(zip(corpora.tolist(), places.tolist(), strict=True))


def test_the_order_of_the_docstring() -> None:
    letters = "".join("ab"[c] for c, _ in drawn([[2], [6]], [0.5, 0.5], 12))
    assert letters == "aabaaabaaaba"  # equally due, the first corpus comes first


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.999, 0.001), (1e-6, 5.0)])
def test_every_corpus_gives_its_tokens_to_within_one_document(weights) -> None:
    random = numpy.random.RandomState(1)
    lengths = [random.geometric(1 / mean, 20_000) for mean in (30, 700)]
    corpora, places = order_of(lengths, weights).locate(numpy.arange(5000))
    tokens = numpy.array([lengths[c][p] for c, p in zip(corpora, places, strict=True)])
    for number, weight in enumerate(weights):
        ours = numpy.cumsum(tokens * (corpora == number))
        due = numpy.cumsum(tokens) * weight / sum(weights)
        assert numpy.abs(ours - due).max() <= max(one.max() for one in lengths)
        assert places[corpora == number].tolist() == list(range((corpora == number).sum()))


# ------------------------------------------------------------------ by blocks, and at once


@pytest.mark.parametrize("weights", [(1, 2, 3), (0.07, 0.3, 5.0), (1e-3, 1, 1)])
@pytest.mark.parametrize("sizes", [(1, 7, 300), (5000, 40, 2500), (3, 3, 3)])
@pytest.mark.parametrize("equal", [False, True])
def test_blocks_are_the_order_made_at_once(monkeypatch, weights, sizes, equal: bool) -> None:
    """Bit for bit, over many epochs, in any order of the samples; also where documents of several
    corpora are due at once, and where lengths lie so that the mean rate misleads."""
    monkeypatch.setattr(blend, "_BLOCK", 64)
    monkeypatch.setattr(blend, "_STRIDE", 16)
    monkeypatch.setattr(blend, "_MOST_READ", 128)
    random = numpy.random.RandomState(len(sizes) + sizes[0])
    lengths = [random.zipf(1.5, size).clip(1, 10**6).astype(numpy.int32) for size in sizes]
    if equal:
        lengths = [numpy.full(size, 6, numpy.int32) for size in sizes]

    def permutation(number: int) -> Callable[[int], numpy.ndarray]:
        return cache(lambda epoch: epoch_order(sizes[number], 11 + number, epoch))

    permutations = [permutation(number) for number in range(3)]
    first = 4000  # of every corpus: the first of all are among them
    due = []
    for number, size in enumerate(sizes):
        epochs = range(-(-first // size))
        tokens = numpy.concatenate([lengths[number][permutations[number](e)] for e in epochs])
        tokens = tokens[:first].astype(numpy.int64)
        due.append((numpy.cumsum(tokens) - tokens / 2) / weights[number])
    corpora, places = numpy.divmod(numpy.argsort(numpy.concatenate(due), kind="stable"), first)
    order = TokenOrder([DueTimes(lengths[n], permutations[n], weights[n]) for n in range(3)])
    for samples in (numpy.arange(4000), random.permutation(4000)[:300], numpy.array([3999, 0])):
        of_corpora, items = order.locate(samples)
        assert (of_corpora == corpora[samples]).all() and (items == places[samples]).all()


def test_shares_of_documents() -> None:
    assert document_weights([0.5, 0.5], [20, 120]) == pytest.approx([6 / 7, 1 / 7])
