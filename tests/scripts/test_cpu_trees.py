"""The measured benchmark of trees: its samples share what they are said to, and its bound is what
the stage's own seconds make of that."""

from random import Random

import cpu_trees
import numpy as np
import pytest
from trees import answers_to, trajectory

from megatron_epp.corpus.shared_prefixes import shared_prefixes

pytestmark = pytest.mark.everything

GROUPS = {
    "answers": cpu_trees.shrunk(answers_to(1, 8, Random(1)), 16, 300),
    "turns": cpu_trees.shrunk(trajectory(5, Random(1)), 16),
}


@pytest.mark.parametrize("name", GROUPS)
def test_samples_share_what_the_group_says(name) -> None:
    group = GROUPS[name]
    samples = cpu_trees.samples_of(group, Random(2))
    assert [len(sample) - 1 for sample in samples] == group.whole
    forest = shared_prefixes([np.array(sample[:-1]) for sample in samples], 1)
    once, pairs = cpu_trees.tokens_and_pairs(group)
    assert forest.tokens == pytest.approx(once, abs=len(samples))  # tokens alike by chance
    own = [length * (length + 1) / 2 for length in group.whole]
    assert once < pairs < sum(own)
    batch = cpu_trees.in_a_row(samples)
    assert batch["tokens"].shape == batch["labels"].shape == (1, sum(group.whole))
    assert batch["cu_seqlens"].diff().tolist() == group.whole


def test_the_bound_is_of_seconds_per_token_and_pair() -> None:
    group, lengths = GROUPS["answers"], [100, 300, 200, 450]
    ops = [
        (kind, number, factor * (2 * n + 0.01 * n * (n + 1) / 2) + 5)
        for kind, factor in (("F", 1), ("B", 2))
        for number, n in enumerate(lengths)
    ]
    once, pairs = found = cpu_trees.tokens_and_pairs(group)
    expected = 3 * (2 * once + 0.01 * pairs)
    assert cpu_trees.bound_seconds(ops, lengths, found) == pytest.approx(expected)
