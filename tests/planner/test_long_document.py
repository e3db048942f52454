"""A document that takes longer than a replica's part of the batch, said with what mends it."""

import re

import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.planner.feasibility import overlong_for_replica

K = 1024


@pytest.mark.parametrize("longest", [64 * K, 256 * K, 1024 * K])
def test_the_degree_that_is_named_mends_it(longest: int) -> None:
    lengths, replicas = [longest] + [2 * K] * 255, 8
    cost = named_cost("llama3-8b", "h100-80g", pp=2, cp=2, dp=replicas)
    line = overlong_for_replica(cost, lengths, replicas)
    assert line is not None and f"a document of {longest} tokens takes" in line
    named = re.search(r"--context-parallel-size (\d+), with (\d+) replicas", line)
    assert named is not None
    cp, left = map(int, named.groups())
    assert cp * left == 2 * replicas
    wider = named_cost("llama3-8b", "h100-80g", pp=2, cp=cp, dp=left)
    assert overlong_for_replica(wider, lengths, left) is None


def test_even_documents_and_one_replica_need_no_word() -> None:
    cost = named_cost("llama3-8b", "h100-80g", pp=2, cp=2, dp=8)
    assert overlong_for_replica(cost, [4 * K] * 64, 8) is None
    assert overlong_for_replica(cost, [256 * K] + [K] * 7, 1) is None
