"""Samples divided over replicas for loops that divide by themselves, without torch."""

import subprocess
import sys
from itertools import product
from random import Random

import numpy as np
import pytest

import megatron_epp
from megatron_epp.corpus.shared_prefixes import PrefixForest, SharedSpan, shared_prefixes
from megatron_epp.planner.chunks.slicing import Rates
from megatron_epp.planner.tree_division import divided_trees, node_seconds

LENGTHS = (9000, 300, 400, 8000, 100, 500, 7000, 200)


def test_long_samples_weigh_by_more_than_their_tokens() -> None:
    parts = megatron_epp.divide(LENGTHS, 2, model="qwen3-8b")
    assert sorted(number for part in parts for number in part) == list(range(len(LENGTHS)))
    (alone,) = (part for part in parts if 0 in part)
    assert 3 not in alone or 6 not in alone
    one, other = (sum(LENGTHS[n] ** 2 for n in part) for part in parts)
    assert max(one, other) < sum(length**2 for length in LENGTHS)
    # By tokens 8000 + 7000 against 9000 and all short ones: further apart than by seconds.
    assert megatron_epp.divide((4, 3, 2, 1), 4, model="qwen3-8b") == ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_as_many_on_every_replica(replicas) -> None:
    parts = megatron_epp.divide(LENGTHS, replicas, model="llama3-8b", same_count=True)
    assert {len(part) for part in parts} == {len(LENGTHS) // replicas}
    assert sorted(number for part in parts for number in part) == list(range(len(LENGTHS)))


RATES = Rates(1.0, 0.001, 20.0)


def group(question: int, answers: tuple[int, ...], name: int) -> list[np.ndarray]:
    """Tokens of answers to one question."""
    return [
        np.concatenate((np.full(question, 100 * name), np.full(answer, 100 * name + n + 1)))
        for n, answer in enumerate(answers)
    ]


def slowest(forest: PrefixForest, parts) -> float:
    """Seconds of the replica that takes longest, what its samples share counted once."""
    seconds = node_seconds(forest, RATES)
    return max(
        sum(seconds[node] for node in {n for sample in part for n in forest.path(sample)})
        for part in parts
    )


def test_groups_stay_together_where_that_is_fair() -> None:
    sequences = [s for name in range(4) for s in group(2000, (300, 200, 400, 100), name)]
    mixed = [sequences[n] for n in Random(3).sample(range(16), 16)]
    forest, lengths = shared_prefixes(mixed), [len(each) for each in mixed]
    parts = megatron_epp.divide(lengths, 4, model="qwen3-8b", prefixes=forest)
    assert sorted(n for part in parts for n in part) == list(range(16))
    assert [len({forest.path(n)[0] for n in part}) for part in parts] == [1] * 4
    apart = megatron_epp.divide(lengths, 4, model="qwen3-8b")
    assert slowest(forest, parts) < 0.6 * slowest(forest, apart)


def test_a_group_that_is_split_pays_for_its_question_again() -> None:
    for question in (400, 40_000):
        forest = shared_prefixes(group(question, (900,) * 8, 1))
        parts = divided_trees(forest, RATES, 2)
        assert [len(part) for part in parts] == [4, 4]
        seconds = node_seconds(forest, RATES)
        assert slowest(forest, parts) == pytest.approx((sum(seconds) + seconds[0]) / 2)
    counted = megatron_epp.divide(
        [9900] * 8, 4, model="qwen3-8b", same_count=True,
        prefixes=shared_prefixes(group(9000, (900,) * 8, 1)),
    )  # fmt: skip
    assert [len(part) for part in counted] == [2] * 4


def test_it_is_near_the_best_of_all_divisions() -> None:
    random, far = Random(7), []
    for _ in range(40):
        sequences = [
            sequence
            for name in range(random.randint(1, 3))
            for sequence in group(
                random.randint(40, 3000),
                tuple(random.randint(1, 2000) for _ in range(random.randint(1, 3))),
                name,
            )
        ]
        if len(sequences) < 2:
            continue
        forest = shared_prefixes(sequences)
        best = min(
            slowest(forest, [[n for n, r in enumerate(chosen) if r == which] for which in (0, 1)])
            for chosen in product((0, 1), repeat=len(sequences))
            if len(set(chosen)) == 2
        )
        far.append(slowest(forest, divided_trees(forest, RATES, 2)) / best)
    assert min(far) >= 1 - 1e-12 and max(far) < 4 / 3 and sum(far) / len(far) < 1.05, far


@pytest.mark.parametrize(
    ("lengths", "replicas", "named", "says"),
    [
        ((5, 0), 1, {}, "divide: a length of 0; expected at least 1 token"),
        ((5, 6), 3, {}, "divide: 2 samples over 3 replicas; expected at least one each"),
        ((5, 6, 7), 2, {"same_count": True}, "3 samples over 2 replicas; expected a multiple"),
        ((5, 6), 2, {"model": "no model"}, "no model"),
        (
            (5, 6),
            2,
            {"prefixes": PrefixForest((SharedSpan(0, 0, 5, -1),), (0, 0))},
            r"divide\(prefixes=\): sequence 1 ends with node 0; expected one that ends at its 6",
        ),
    ],
)
def test_what_cannot_be_divided_is_one_line(lengths, replicas, named, says) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        megatron_epp.divide(lengths, replicas, **({"model": "qwen3-8b"} | named))
    assert "\n" not in str(refused.value)


def test_no_torch_is_imported() -> None:
    asks = (
        "import sys, megatron_epp; megatron_epp.divide((5, 9), 2, model='qwen3-8b'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", asks], check=True)
