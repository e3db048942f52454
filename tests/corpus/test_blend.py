"""Documents of several corpora in the order that gives tokens by weights."""

import numpy
import pytest

from megatron_epp.corpus.blend import document_weights, order_by_tokens


def corpus(*lengths: int):
    """Tokens of the first n documents of a corpus that is read over and over."""
    return lambda count: numpy.resize(numpy.array(lengths), count)


def drawn(lengths, weights, size: int) -> list[tuple[int, int]]:
    corpora, places = order_by_tokens(lengths, weights, size)
    return list(zip(corpora.tolist(), places.tolist(), strict=True))


def test_the_order_of_the_docstring() -> None:
    letters = "".join("ab"[c] for c, _ in drawn([corpus(2), corpus(6)], [0.5, 0.5], 12))
    assert letters == "aabaaabaaaba"  # equally due, the first corpus comes first


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.999, 0.001), (1e-6, 5.0)])
def test_every_corpus_gives_its_tokens_to_within_one_document(weights) -> None:
    random = numpy.random.RandomState(1)
    lengths = [random.geometric(1 / mean, 20_000) for mean in (30, 700)]
    corpora, places = order_by_tokens([corpus(*one) for one in lengths], weights, 5000)
    tokens = numpy.array([lengths[c][p] for c, p in zip(corpora, places, strict=True)])
    for number, weight in enumerate(weights):
        ours = numpy.cumsum(tokens * (corpora == number))
        due = numpy.cumsum(tokens) * weight / sum(weights)
        assert numpy.abs(ours - due).max() <= max(one.max() for one in lengths)
        assert places[corpora == number].tolist() == list(range((corpora == number).sum()))


def test_a_longer_run_draws_the_same_first() -> None:
    lengths = [corpus(3, 9, 4), corpus(50), corpus(7, 1)]
    longer = drawn(lengths, [1, 2, 3], 900)
    for size in (0, 1, 7, 400):
        assert drawn(lengths, [1, 2, 3], size) == longer[:size]


def test_shares_of_documents() -> None:
    assert document_weights([0.5, 0.5], [20, 120]) == pytest.approx([6 / 7, 1 / 7])
