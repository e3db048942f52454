"""One policy for overlong documents: what is planned is what is trained on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.corpus.overlong import OVERLONG, Counts, apply_context


@pytest.mark.parametrize(
    ("context", "overlong", "counts"),
    [
        (0, "drop", Counts(5, 3, 15, skipped=2)),
        (8, "drop", Counts(5, 3, 15, skipped=2)),
        (3, "drop", Counts(5, 1, 2, skipped=2, dropped=2, lost_tokens=13)),
        (3, "truncate", Counts(5, 3, 8, skipped=2, truncated=2, lost_tokens=7)),
        (3, "split", Counts(5, 6, 15, skipped=2, split=2)),
    ],
)
def test_counts_by_policy(context: int, overlong: str, counts: Counts) -> None:
    """Sequences of 1, 6, 0, 3 and 9 tokens."""
    assert apply_context(np.array([0, 5, -1, 2, 8], np.int32), context, overlong).counts == counts


@given(st.lists(st.integers(-1, 30), max_size=20), st.integers(1, 12), st.sampled_from(OVERLONG))
def test_tokens_are_kept_or_counted_as_lost(inputs: list[int], context: int, overlong: str) -> None:
    index = apply_context(np.array(inputs, np.int32), context, overlong, first_sequence=100)
    usable = [length for length in inputs if length >= 1]
    assert index.counts.tokens + index.counts.lost_tokens == sum(usable)
    assert index.counts.skipped + len(usable) == len(inputs)
    assert all(1 <= length <= context for length in index.inputs)
    # The slow twin: one document after the other.
    expected = []
    for number, length in enumerate(inputs, 100):
        starts = range(0, length, context) if overlong == "split" else range(length > 0)
        for start in starts:
            if overlong != "drop" or length <= context:
                expected.append((number, start, min(context, length - start)))
    columns = index.sequences, index.starts, index.inputs
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert {column.dtype for column in columns} == {np.dtype("int32")}


def test_counts_say_what_was_lost() -> None:
    counts = Counts(5, 2, 30, skipped=1, truncated=2, lost_tokens=10)
    assert str(counts) == (
        "2 documents, 30 input tokens; 1 of fewer than 2 tokens skipped; 2 truncated; "
        "10 tokens (25.0%) lost to the context"
    )
    assert counts + counts == Counts(10, 4, 60, skipped=2, truncated=4, lost_tokens=20)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="overlong 'cut': expected one of truncate, drop, split"):
        apply_context(np.array([1]), 1, "cut")
