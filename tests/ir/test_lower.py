"""Lowered programs: every message once, in one order at both ends, and nothing that blocks."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.ir import (
    HandOver,
    Kind,
    Message,
    Op,
    Plan,
    Post,
    StageOp,
    Transfer,
    lower,
    lower_rank,
)
from tests.plans import EXAMPLE, any_plans, evaluation


def test_the_example() -> None:
    programs = [" ".join(map(str, program)) for program in lower(Plan.parse(EXAMPLE))]
    assert programs == [
        "F0 SEND:F0>1 F1 SEND:F1>1 F2 SEND:F2>1 POST:B1<1 POST:B0<1 RECV:B1<1 B1 POST:B2<1 "
        "RECV:B0<1 B0 RECV:B2<1 B2",
        "POST:F0<0 RECV:F0<0 F0 POST:F1<0 POST:F2<0 RECV:F1<0 F1 B1 SEND:B1>0 B0 SEND:B0>0 "
        "RECV:F2<0 F2 B2 SEND:B2>0",
    ]


def transfers(plan: Plan) -> tuple[dict, dict]:
    """By link, the messages in the order sent and in the order received; they are posted in it."""
    sent: dict[tuple[int, int], list[Message]] = {}
    posted: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for rank, program in enumerate(lower(plan)):
        for step in program:
            if isinstance(step, Post):
                assert step.message.link[1] == rank
                posted.setdefault(step.message.link, []).append(step.message)
            if isinstance(step, Transfer):
                source, target = step.message.link
                ends = {Kind.SEND: (sent, source), Kind.RECEIVE: (received, target)}
                where, own = ends[step.kind]
                assert own == rank
                where.setdefault(step.message.link, []).append(step.message)
    assert posted == sent
    return sent, received


@given(any_plans(), st.booleans())
def test_both_ends_of_a_link_name_the_same_messages_in_the_same_order(plan, evaluates) -> None:
    """An evaluation sends forwards only."""
    sent, received = transfers(evaluation(plan) if evaluates else plan)
    assert sent == received
    links = between_ranks(plan, False) * (1 if evaluates else 2)
    if plan.vocabulary_parallel:
        links += between_ranks(plan, True)
    messages = [message for link in sent.values() for message in link]
    assert len(messages) == len(set(messages)) == len(links) * len(plan.chunks)
    assert not evaluates or set(sent) == set(links)


def between_ranks(plan: Plan, round_trip: bool) -> list[tuple[int, int]]:
    """The links from each stage to the next that lead to another rank; ``round_trip``: and from the
    last to the first."""
    pairs = list(pairwise(plan.rank_of)) + [(plan.rank_of[-1], plan.rank_of[0])] * round_trip
    return [pair for pair in pairs if pair[0] != pair[1]]


@given(any_plans())
def test_programs_are_the_projection_of_one_sequence(plan: Plan) -> None:
    """Some sequence of ops and messages, each message in it once for both its ends, has every
    program as its part: whoever stands first can always go on."""
    programs = lower(plan)
    at = [0] * plan.ranks
    met: set[Message] = set()
    while at != list(map(len, programs)):
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                step = program[at[rank]]
                if isinstance(step, Transfer) and step.kind is Kind.RECEIVE:
                    assert step.message in met  # before it is waited for, not only by then
                elif isinstance(step, HandOver):
                    made = programs[rank][at[rank] - 1]  # right behind the op that makes it
                    assert isinstance(made, StageOp) and made.stage == step.message.source
                elif not isinstance(step, (Op, StageOp)):
                    other = sum(step.message.link) - rank
                    there = programs[other][at[other] : at[other] + 1]
                    if step.message not in met:
                        if not there or getattr(there[0], "message", None) != step.message:
                            break
                        met.add(step.message)
                        at[other] += 1
                at[rank] += 1
                moved = True
        assert moved
    ran = [[str(one) for one in program if isinstance(one, Op | StageOp)] for program in programs]
    assert ran == [[plan.op_name(*place) for place in order] for order in plan.rank_orders]


@given(any_plans())
def test_one_rank_is_lowered_alone(plan: Plan) -> None:
    assert tuple(lower_rank(plan, rank) for rank in range(plan.ranks)) == lower(plan)
