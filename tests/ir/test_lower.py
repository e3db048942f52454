"""Lowered programs: every message once, in one order at both ends, and nothing that blocks."""

from collections import deque

from hypothesis import given

from megatron_epp.ir import Kind, Message, Plan, Transfer, lower
from tests.plans import EXAMPLE, evaluation, plans


def test_the_example() -> None:
    programs = [" ".join(map(str, program)) for program in lower(Plan.parse(EXAMPLE))]
    assert programs == [
        "F0 SEND:F0>1 F1 SEND:F1>1 F2 SEND:F2>1 RECV:B1<1 B1 RECV:B0<1 B0 RECV:B2<1 B2",
        "RECV:F0<0 F0 RECV:F1<0 F1 B1 SEND:B1>0 B0 SEND:B0>0 RECV:F2<0 F2 B2 SEND:B2>0",
    ]


def transfers(plan: Plan) -> tuple[dict, dict]:
    """By link, the messages in the order sent and in the order received."""
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for stage, program in enumerate(lower(plan)):
        for step in program:
            if isinstance(step, Transfer):
                ends = {Kind.SEND: (sent, step.message.source)}
                ends[Kind.RECEIVE] = (received, step.message.target)
                where, own = ends[step.kind]
                assert own == stage
                where.setdefault(step.message.link, []).append(step.message)
    return sent, received


@given(plans())
def test_both_ends_of_a_link_name_the_same_messages_in_the_same_order(plan: Plan) -> None:
    sent, received = transfers(plan)
    assert sent == received
    messages = [message for link in sent.values() for message in link]
    assert len(messages) == len(set(messages)) == 2 * (plan.stages - 1) * len(plan.chunks)


@given(plans())
def test_evaluation_sends_forwards_only(plan: Plan) -> None:
    sent, received = transfers(evaluation(plan))
    assert sent == received
    assert all(target == source + 1 for source, target in sent)
    assert sum(map(len, sent.values())) == (plan.stages - 1) * len(plan.chunks)


@given(plans())
def test_programs_run_with_ordered_links_and_receives_that_block(plan: Plan) -> None:
    """As the executor runs them: sends never block, a receive takes the link's next message."""
    programs = lower(plan)
    at = [0] * plan.stages
    links: dict[tuple[int, int], deque[Message]] = {}
    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            while at[stage] < len(program):
                step = program[at[stage]]
                if isinstance(step, Transfer):
                    link = links.setdefault(step.message.link, deque())
                    if step.kind is Kind.SEND:
                        link.append(step.message)
                    elif not link:
                        break
                    else:
                        assert link.popleft() == step.message
                at[stage] += 1
                moved = True
    assert at == list(map(len, programs))
    assert not any(links.values())
    assert (
        tuple(
            tuple(step for step in program if not isinstance(step, Transfer))
            for program in programs
        )
        == plan.orders
    )
