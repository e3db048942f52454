"""Sequences that begin alike: found whoever says it, each token in one node."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.corpus.shared_prefixes import LEAST, shared_prefixes


def words(*texts: str) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def told(texts: list[str], least: int = 1) -> list[str]:
    forest = shared_prefixes(words(*texts), least)
    return [
        "|".join(texts[n.sequence][n.start : n.stop] for n in map(forest.nodes.__getitem__, path))
        for path in map(forest.path, range(len(texts)))
    ]


def test_what_they_share_stands_once() -> None:
    assert told(["abcde", "abcdf", "abcx"]) == ["abc|d|e", "abc|d|f", "abc|x"]
    assert told(["ab", "abc", "ab", "x"]) == ["ab", "ab|c", "ab", "x"]
    assert told(["ab", "cd"]) == ["ab", "cd"]
    assert shared_prefixes(words("ab", "abc", "ab"), 1).tokens == 3
    assert shared_prefixes(words("abcde", "abcdf", "abcx"), 1).tokens == 7


def test_little_is_left_to_each() -> None:
    assert told(["abcde", "abcdf", "abcx"], least=4) == ["abcd|e", "abcd|f", "abcx"]
    assert told(["abcde", "abcdf", "abcx"], least=5) == ["abcde", "abcdf", "abcx"]
    answers = ["p" * LEAST + "a", "p" * LEAST + "b"]
    assert told(answers, LEAST) == ["p" * LEAST + "|a", "p" * LEAST + "|b"]


def test_turns_of_a_conversation_are_a_chain() -> None:
    assert told(["q1", "q1a1q2", "q1a1q2a2q3"]) == ["q1", "q1|a1q2", "q1|a1q2|a2q3"]


def test_labels_must_be_alike_too() -> None:
    tokens = np.array([[1, 2], [2, 3], [3, 4]]), np.array([[1, 2], [2, 3], [3, 5]])
    forest = shared_prefixes(tokens, 1)
    assert [(n.start, n.stop) for n in forest.nodes] == [(0, 2), (2, 3), (2, 3)]


@given(st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=7), st.integers(1, 4))
def test_every_sequence_is_its_path(texts: list[str], least: int) -> None:
    found = told(texts, least)
    assert [path.replace("|", "") for path in found] == texts
    forest = shared_prefixes(words(*texts), least)
    assert all(node.parent < number for number, node in enumerate(forest.nodes))
    if least == 1:  # nothing is computed twice: as many nodes' tokens as there are beginnings
        assert forest.tokens == len({text[: n + 1] for text in texts for n in range(len(text))})


def test_it_is_linear(monkeypatch) -> None:
    """A thousand answers to one question are compared with one of them, and not with each other."""
    compared = 0

    class Counted(np.ndarray):
        def __ne__(self, other):
            nonlocal compared
            compared += len(self)
            return np.asarray(self) != np.asarray(other)

    rows = [np.concatenate((np.zeros(500, int), [n + 1] * 500)) for n in range(1000)]
    plain = np.ascontiguousarray
    monkeypatch.setattr(np, "ascontiguousarray", lambda each: plain(each).view(Counted))
    forest = shared_prefixes(rows)
    assert forest.tokens == 500 + 1000 * 500
    assert compared < 2 * sum(map(len, rows))


def test_bad_input_is_a_line() -> None:
    with pytest.raises(ValueError, match="sequence 1 has no token; expected at least one"):
        shared_prefixes(words("a", ""))
    with pytest.raises(ValueError, match="least 0: expected at least 1 token"):
        shared_prefixes(words("a"), 0)
