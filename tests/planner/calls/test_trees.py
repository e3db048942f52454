"""Plans of calls in which documents continue others: computed once, cut and packed as all are."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from megatron_epp.ir import check, slices_of
from megatron_epp.planner.calls.call_cost import CallDocuments
from megatron_epp.planner.calls.call_options import CallOptions
from megatron_epp.planner.calls.cuttings import cuttings
from megatron_epp.planner.chunks.slicing import Rates
from megatron_epp.planner.chunks.tree_cutting import tree_seconds
from tests.planner.calls.one_replica import call_plan

RATES = Rates(1.0, 0.001, 20.0)
# [stages, kinds, 3]: seconds per token, pair and op of F, B, I, W.
GIVEN = np.array([[[1.0, 0.001, 20.0], [2.0, 0.002, 40.0]] + [[1.04, 0.00104, 20.8]] * 2] * 4)
QUESTION, ANSWERS = 4000, (900, 300, 1200, 700, 80, 2500)
GROUP = (QUESTION, *ANSWERS), (-1, *(0 for _ in ANSWERS))


def random_tree(random: Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lengths = tuple(random.randint(1, 3000) for _ in range(random.randint(1, 12)))
    parents = [-1]
    for document in range(1, len(lengths)):
        parents.append(random.choice((-1, 0, document - 1, random.randrange(document))))
    return lengths, tuple(parents)


def test_what_is_continued_is_paid_once() -> None:
    lengths, parents = GROUP
    tree = tree_seconds(lengths, parents, RATES)
    own = [QUESTION + 0.001 * QUESTION * (QUESTION + 1) / 2]
    own += [n + 0.001 * (n * (n + 1) / 2 + n * QUESTION) for n in ANSWERS]
    assert tree.own == pytest.approx(own)
    assert tree.total == pytest.approx(sum(own)) == pytest.approx(tree.below[0])
    alone = [n + 0.001 * n * (n + 1) / 2 for n in (QUESTION + answer for answer in ANSWERS)]
    assert tree.total < 0.5 * sum(alone)


def test_chunks_take_about_as_long_as_wanted_and_continue_one() -> None:
    random = Random(5)
    for _ in range(60):
        batches = [random_tree(random) for _ in range(random.randint(1, 3))]
        lengths, parents = zip(*batches, strict=True)
        for call in cuttings([CallDocuments(lengths, parents)], RATES):
            (plan,) = call.plans((1,))
            slices = slices_of(plan)  # refuses what computes a token twice, or continues two
            assert all(before < chunk for chunk, before in enumerate(slices.earlier))
            assert call.chunking.pairs.tolist() == [
                plan.pairs(chunk) for chunk in range(len(plan.chunks))
            ]
    (first, *others) = cuttings([CallDocuments([GROUP[0]], [GROUP[1]])], RATES)
    assert first.chunking.count == 1
    longest = [float(RATES.seconds(call.loads.tokens, call.loads.pairs).max()) for call in others]
    total = tree_seconds(*GROUP, RATES).total
    parts = [2, 3, 4, 6, 8, 12, 16]
    for found, wanted in zip(longest, parts, strict=False):
        assert found < 1.5 * total / wanted  # a slice is a whole number of times what is wanted
    assert all(a >= b for a, b in pairwise(longest))


def test_the_plan_runs_and_takes_less_than_one_with_copies() -> None:
    groups = [GROUP] * 4
    lengths, parents = zip(*groups, strict=True)
    options = CallOptions()
    plan = call_plan(lengths, (1,) * 4, GIVEN, options, False, parents)
    check(plan)
    copies = [tuple(QUESTION + answer for answer in ANSWERS)] * 4
    apart = call_plan(copies, (1,) * 4, GIVEN, options, False)
    assert plan.tokens == 4 * sum(GROUP[0])
    assert plan.predicted.seconds < 0.5 * apart.predicted.seconds
    evaluation = call_plan(lengths, (1,) * 4, GIVEN, options, True, parents)
    check(evaluation)


def test_without_trees_plans_are_what_they_were() -> None:
    lengths = [(9000, 400), (800, 700, 600), (5000,)]
    plain = call_plan(lengths, (1,) * 4, GIVEN, CallOptions(), False)
    none = [tuple(-1 for _ in of) for of in lengths]
    assert str(call_plan(lengths, (1,) * 4, GIVEN, CallOptions(), False, ())) == str(plain)
    loose = call_plan(lengths, (1,) * 4, GIVEN, CallOptions(), False, none)
    assert "prefix" not in str(loose)
    assert loose.predicted.seconds == pytest.approx(plain.predicted.seconds, rel=0.1)
