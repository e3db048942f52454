"""Samples divided over replicas for loops that divide by themselves, without torch."""

import subprocess
import sys

import pytest

import megatron_epp

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


@pytest.mark.parametrize(
    ("lengths", "replicas", "named", "says"),
    [
        ((5, 0), 1, {}, "divide: a length of 0; expected at least 1 token"),
        ((5, 6), 3, {}, "divide: 2 samples over 3 replicas; expected at least one each"),
        ((5, 6, 7), 2, {"same_count": True}, "3 samples over 2 replicas; expected a multiple"),
        ((5, 6), 2, {"model": "no model"}, "no model"),
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
