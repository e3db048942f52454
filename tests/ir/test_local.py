"""Documents local to a context-parallel rank: text, checks, and how many rows they make."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.ir import ALL_RANKS, Chunk, Plan, PlanError, Span, check, check_ranks
from megatron_epp.ir.random_plan import with_local
from tests.plans import EXAMPLE, plans

LOCAL = EXAMPLE.replace("1[0:1500]", "1[0:1500]@1").replace("2[0:900]", "2[0:900]@0")


def test_a_rank_is_said_behind_its_span_and_nothing_where_all_share_it() -> None:
    plan = Plan.parse(LOCAL)
    assert str(plan) == LOCAL
    assert plan.chunks[1].spans == (Span(0, 5000, 9000), Span(1, 0, 1500, 1))
    assert plan.chunks[2].spans[0].rank == 0
    assert Span.parse("2[0:900]").rank == ALL_RANKS
    assert plan.digest != Plan.parse(EXAMPLE).digest


@given(plans(), st.integers(2, 5), st.integers(0, 99))
def test_plans_with_local_documents_go_to_text_and_back(plan: Plan, ranks: int, seed: int) -> None:
    local = with_local(plan, Random(seed), ranks)
    assert Plan.parse(str(local)) == local
    check(local)
    check_ranks(local, ranks)
    everywhere = [
        Chunk(tuple(Span(s.document, s.start, s.stop) for s in chunk.spans))
        for chunk in local.chunks
    ]
    assert tuple(everywhere) == plan.chunks


@given(plans(), st.integers(2, 5), st.integers(0, 99))
def test_every_rank_has_the_rows_of_the_fullest(plan: Plan, ranks: int, seed: int) -> None:
    for chunk in with_local(plan, Random(seed), ranks).chunks:
        own = chunk.local_tokens(ranks)
        assert chunk.sharded_tokens + sum(own) == chunk.tokens
        assert chunk.rows(ranks) == chunk.sharded_tokens + ranks * max(own)
        assert chunk.rows(ranks) >= chunk.tokens == chunk.rows(1)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("0[1:4]@1", "only a whole document is local to a rank"),
        ("0[0:4]@", "is not a span"),
        ("0[0:4]@01", "is not a span"),
        ("0[0:4]@-1", "is not a span"),
        ("0[0:4] @1", "is not a span"),
    ],
)
def test_what_is_no_local_span_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(PlanError, match=wrong):
        Span.parse(text)


def test_a_slice_is_not_local() -> None:
    with pytest.raises(PlanError, match=r"chunk 0: 0\[0:5000\]@1 is a slice of document 0"):
        Plan.parse(LOCAL.replace("0[0:5000]", "0[0:5000]@1"))
    with pytest.raises(PlanError, match="only a whole document is local"):
        Span(0, 0, 4, -2)


@pytest.mark.parametrize(
    ("ranks", "wrong"),
    [(1, r"chunk 1: 1\[0:1500\]@1 is local to context-parallel rank 1; expected no @"), (2, None)],
)
def test_ranks_must_be_there(ranks: int, wrong: str | None) -> None:
    plan = Plan.parse(LOCAL)
    if wrong is None:
        check_ranks(plan, ranks)
        return
    with pytest.raises(PlanError, match=wrong):
        check_ranks(plan, ranks)
    check_ranks(Plan.parse(EXAMPLE), ranks)
