"""One policy for overlong documents: what is planned is what is trained on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.corpus.overlong import OVERLONG, Counts, apply_context


def test_policies_on_one_corpus() -> None:
    """Sequences of 1, 6, 0, 3 and 9 tokens."""
    inputs = np.array([0, 5, -1, 2, 8], np.int32)

    for unlimited in (0, 8):
        whole = apply_context(inputs, unlimited, "drop")
        assert whole.sequences.tolist() == [1, 3, 4]
        assert whole.inputs.tolist() == [5, 2, 8]
        assert whole.counts == Counts(sequences=5, documents=3, tokens=15, skipped=2)

    cut = apply_context(inputs, 3, "truncate")
    assert cut.inputs.tolist() == [3, 2, 3]
    assert (cut.counts.truncated, cut.counts.lost_tokens) == (2, 7)

    dropped = apply_context(inputs, 3, "drop")
    assert dropped.sequences.tolist() == [3]
    assert (dropped.counts.dropped, dropped.counts.lost_tokens) == (2, 13)

    split = apply_context(inputs, 3, "split", first_sequence=100)
    assert split.sequences.tolist() == [101, 101, 103, 104, 104, 104]
    assert split.starts.tolist() == [0, 3, 0, 0, 3, 6]
    assert split.inputs.tolist() == [3, 2, 2, 3, 3, 2]
    assert (split.counts.split, split.counts.lost_tokens) == (2, 0)
    assert {split.sequences.dtype, split.starts.dtype, split.inputs.dtype} == {np.dtype("int32")}


@given(st.lists(st.integers(-1, 30), max_size=20), st.integers(1, 12), st.sampled_from(OVERLONG))
def test_tokens_are_kept_or_counted_as_lost(inputs: list[int], context: int, overlong: str) -> None:
    index = apply_context(np.array(inputs, np.int32), context, overlong)
    usable = [length for length in inputs if length >= 1]
    assert index.counts.tokens + index.counts.lost_tokens == sum(usable)
    assert index.counts.skipped + len(usable) == len(inputs)
    assert all(1 <= length <= context for length in index.inputs)
    # The slow twin: one document after the other.
    expected = []
    for length in usable:
        if overlong == "split":
            expected += [min(context, length - at) for at in range(0, length, context)]
        elif length <= context or overlong == "truncate":
            expected.append(min(context, length))
    assert index.inputs.tolist() == expected


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
