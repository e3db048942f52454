"""Micro-batches are drawn once each, in the iterator's order, and read in any."""

import pytest

from megatron_epp.mcore.loops.microbatch_iterators import MicroBatches


class Offsets:
    """A source as slime's: read at an offset, some samples at a time."""

    def __init__(self, values: list, indices: list | None = None, size: int | None = None):
        self.values, self.micro_batch_indices, self.micro_batch_size = values, indices, size
        self.offset = 0

    def get_next(self, keys: list) -> dict:
        if self.micro_batch_indices is not None:
            chosen = [self.values[i] for i in self.micro_batch_indices[self.offset]]
            self.offset += 1
        else:
            chosen = self.values[self.offset : self.offset + self.micro_batch_size]
            self.offset += self.micro_batch_size
        return dict.fromkeys(keys, chosen)


def test_micro_batches_are_drawn_in_order_and_read_in_any() -> None:
    batches = MicroBatches(iter("abcd"), 4)
    assert [batches.item(n) for n in (2, 0, 3, 1)] == ["c", "a", "d", "b"]
    batches.let_go(2)
    assert batches.item(2) is None and batches.item(1) == "b"


def test_who_draws_nothing_leaves_the_source_alone() -> None:
    source = iter("abcd")
    MicroBatches(source, 4).finish()
    assert next(source) == "a"


@pytest.mark.parametrize(
    "source",
    [Offsets(list(range(6)), indices=[[0, 5], [1], [2, 3, 4]]), Offsets(list(range(6)), size=2)],
)
def test_sources_with_an_offset(source) -> None:
    """They are read at the place of each micro-batch, and stand behind the last one afterwards."""
    expected = [source.get_next(["x"])["x"] for _ in range(3)]
    after, source.offset = source.offset, 0
    batches = MicroBatches(source, 3)
    assert batches.readable
    assert batches.item(1).get_next(["x"])["x"] == expected[1]  # measuring moves nothing
    assert source.offset == 0
    assert [batches.item(n).get_next(["x"])["x"] for n in (2, 0, 1)] == [
        expected[n] for n in (2, 0, 1)
    ]
    assert batches.item(0).micro_batch_size == source.micro_batch_size
    batches.finish()
    assert source.offset == after


def test_ranks_without_an_iterator_are_known() -> None:
    assert not MicroBatches(None, 2).readable
    assert not MicroBatches(range(3), 2).readable  # Megatron's own tests hand it over; nobody draws
