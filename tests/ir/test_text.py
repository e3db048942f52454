"""Everything in the language prints as text that parses back to itself."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.ir import (
    Chunk,
    Kind,
    Message,
    Op,
    Payload,
    Plan,
    PlanError,
    Prediction,
    Span,
    Step,
    Timed,
    Transfer,
    check,
    format_records,
    parse_records,
)
from megatron_epp.ir.random_plan import arbitrary_plan
from megatron_epp.ir.recompute import MODES, format_recompute, offload_among, parse_recompute
from megatron_epp.ir.timed import MOST_SECONDS
from tests.plans import EXAMPLE, any_plans, plans
from tests.refusals import refusal

finite = st.floats(0, allow_nan=False, allow_infinity=False)
seconds = st.floats(0, MOST_SECONDS)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,20}", fullmatch=True)


def test_the_example_prints_as_itself() -> None:
    plan = Plan.parse(EXAMPLE)
    assert str(plan) == EXAMPLE
    assert plan.tokens == 11400
    assert plan.stages == 2
    assert plan.digest == Plan.parse(EXAMPLE).digest
    assert plan.chunks[1].spans == (Span(0, 5000, 9000), Span(1, 0, 1500))


@given(any_plans(), st.data())
def test_plans_go_to_text_and_back(plan: Plan, data: st.DataObject) -> None:
    peaks = st.lists(finite, min_size=plan.ranks, max_size=plan.ranks).map(tuple)
    predicted = data.draw(st.none() | st.builds(Prediction, finite, peaks, names))
    plan = replace(plan, replica=2, replicas=5, predicted=predicted)
    assert Plan.parse(str(plan)) == plan
    assert str(Plan.parse(str(plan))) == str(plan)
    assert Plan.parse(str(plan)).digest == plan.digest


@given(plans())
def test_a_digest_tells_plans_apart(plan: Plan) -> None:
    other = Plan(plan.documents, plan.layers, plan.chunks, plan.recompute, plan.orders, 1, 2)
    assert plan.digest != other.digest


def test_blanks_comments_and_defaults() -> None:
    text = """
      # by hand
      plan   v1

      documents 3\t2      # two short ones
      layers 1
      chunk 0: 0[0:3]  1[0:2]
      stage 0: F0   B0 # all of it
    """
    plan = Plan.parse(text)
    assert (plan.replica, plan.replicas, plan.predicted) == (0, 1, None)
    assert plan.recompute == (("k",),)
    assert Plan.parse(str(plan)) == plan


@given(st.lists(st.integers(1, 60), min_size=2, max_size=8), st.integers(0, 2**32), st.data())
def test_steps_go_to_text_and_back(lengths: list[int], seed: int, data: st.DataObject) -> None:
    dealt = data.draw(st.permutations(range(len(lengths))))
    boundary = data.draw(st.integers(1, len(lengths) - 1))
    assignments = (tuple(dealt[:boundary]), tuple(dealt[boundary:]))
    step = Step(
        assignments,
        tuple(
            arbitrary_plan(
                [lengths[d] for d in deal], (2, 1), Random(seed), replica=replica, replicas=2
            )
            for replica, deal in enumerate(assignments)
        ),
    )
    assert Step.parse(str(step)) == step
    assert step.lengths == tuple(lengths)


def test_a_plan_alone_is_a_step() -> None:
    step = Step.parse(EXAMPLE)
    assert step.assignments == ((0, 1, 2),)
    assert step.lengths == (9000, 1500, 900)
    assert Step.parse(str(step)) == step


@given(st.text(MODES, max_size=40))
def test_recompute_choices_go_to_text_and_back(choice: str) -> None:
    assert parse_recompute(format_recompute(choice)) == choice


@given(st.text("kfc", max_size=30), st.integers(0, 30))
def test_offloading_keeps_the_order_of_the_others(choice: str, count: int) -> None:
    """And between two offloaded layers lie as many others as between any two, give or take one."""
    dealt = offload_among(choice, count)
    assert dealt.replace("o", "") == choice
    assert dealt.count("o") == count
    if count:
        between = [len(part) for part in dealt.split("o")]
        assert between[0] == 0
        assert max(between[1:]) - min(between[1:]) <= 1


def _records() -> st.SearchStrategy[Timed]:
    chunk, stage = st.integers(0, 999), st.integers(0, 63)
    ops = st.builds(Op, st.sampled_from((Kind.FORWARD, Kind.WEIGHT)), chunk)

    def timed(stage: int, peer: int, op: Op, payload: Payload, what: int, *times) -> Timed:
        ends = {0: (stage, peer), 1: (peer, stage)}
        kind = Kind.SEND if what == 0 else Kind.RECEIVE
        return Timed(
            stage,
            op if what == 2 else Transfer(kind, Message(payload, op.chunk, *ends[what])),
            *times,
        )

    return st.builds(
        timed,
        stage,
        stage,
        ops,
        st.sampled_from(Payload),
        st.integers(0, 2),
        seconds,
        seconds,
        st.integers(0, 10**15),
    )


@given(st.lists(_records(), max_size=20))
def test_records_go_to_text_and_back(records: list[Timed]) -> None:
    assert parse_records(format_records(records)) == tuple(records)


@pytest.mark.parametrize(
    ("parse", "text", "error"),
    [
        (Span.parse, "0[5:5]", "span 0[5:5]: expected document >= 0 and 0 <= start < stop"),
        (Span.parse, "0[00:5]", "'0[00:5]' is not a span; expected DOCUMENT[START:STOP]"),
        (Span.parse, "0[0:5]\n", "is not a span"),
        (Op.parse, "F-1", "'F-1' is not an op; expected F, B, I, W, H or G and a chunk, as in F0"),
        (Op.parse, "SEND0", "is not an op"),
        (parse_recompute, "1k1k", "'1k1k' is not a recompute choice; expected runs of a count"),
        (parse_recompute, "2z", "is not a recompute choice"),
        (lambda text: Chunk.parse(text.split()), "0[0:1] 0[1:2]", "a document appears twice"),
        (lambda text: Chunk.parse(text.split()), "", "a chunk holds no span"),
        (Timed.parse, "0 F0 0.0 nan 5", "is not a timed record; expected STAGE OP START STOP"),
        (Timed.parse, "0 F0 0.0 1_0.0 5", "is not a timed record"),
        (Timed.parse, "0 F0 0.0 1.0", "is not a timed record"),
        (Timed.parse, "0 SEND:F0<1 0.0 1.0 5", "is not a timed record"),
        (parse_records, "timed v2\n", "'timed v2': expected the line 'timed v1'"),
        (Step.parse, "", "no 'plan v1' line"),
    ],
)
def test_refusals_say_what_was_expected(parse, text: str, error: str) -> None:
    assert error in refusal(PlanError, parse, text)


def _edited(old: str, new: str) -> str:
    assert old in EXAMPLE
    return EXAMPLE.replace(old, new)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "plan ends too early: expected 'plan v1'"),
        (_edited("plan v1", "plan v2"), "plan line 1 ('plan v2'): expected 'plan v1'"),
        (_edited("0 of 1", "1 of 1"), "replica 1 of 1: expected one of them"),
        (_edited("0 of 1", "0 to 1"), "plan line 2 ('replica 0 to 1'): expected 'replica N of M'"),
        (_edited("900\n", "9e2\n"), "'9e2' is not a whole number"),
        (_edited("1500 900", "1500 0"), "a document of 0 inputs; expected at least 1"),
        (_edited("layers 4 4", "layers 4 10000"), "expected at most 9999 layers on a stage"),
        (_edited("layers 4 4", "layers"), "expected 'layers' and whole numbers"),
        (_edited("chunk 1", "chunk 2"), "plan line 6 ("),
        (_edited("2[0:900]", "3[0:900]"), "chunk 2: document 3; there are 3"),
        (_edited("2[0:900]", "2[0:901]"), "chunk 2: 2[0:901] exceeds document 2 of 900 inputs"),
        (_edited("3f1k 4k", "3f2k 4k"), "recompute 0, chunk 0: 3f2k covers 5 layers; stage 0"),
        (_edited("3f1k 4k 2c2k", "3f1k 4k"), "2 choices for 3 chunks"),
        (_edited("recompute 1: 4k 4k 4k\n", ""), "1 have recompute choices"),
        (_edited("B1 B0 B2\n", "B1 B0 B3\n"), "B3 names chunk 3; there are 3"),
        (_edited("10.5 9.8", "10.5"), "predicted: 1 peaks for 2 stages"),
        (_edited("1.234", "1e999"), "predicted inf: expected a finite number"),
        (_edited("planner epp", "planner"), "expected 'predicted seconds S peak_gib G"),
        (_edited("planner epp", "planner é"), "expected one word"),
        (EXAMPLE + "stage 2: F0\n", "did not expect this line here"),
        (EXAMPLE + EXAMPLE, "plan line 13 ('plan v1'): did not expect this line here"),
    ],
)
def test_a_bad_plan_line_is_named(text: str, error: str) -> None:
    assert error in refusal(PlanError, Plan.parse, text)


def test_a_replica_without_documents() -> None:
    idle = Plan.parse("plan v1\ndocuments -\nlayers 2\nchunk 0: -\nstage 0: F0 B0\n")
    assert idle.documents == () and Plan.parse(str(idle)) == idle and "documents -\n" in str(idle)
    check(idle)
    with pytest.raises(PlanError, match="document 0; there are 0"):
        Plan.parse("plan v1\ndocuments -\nlayers 2\nchunk 0: 0[0:1]\nstage 0: F0 B0\n")


@pytest.mark.parametrize(
    ("head", "error"),
    [
        ("", "expected the line 'step v1' before the plans of several replicas"),
        ("step v1\ndeal 0: 0\ndeal 2: 1\n", "'deal 2: 1': expected 'deal 1: DOCUMENT ...'"),
        ("step v1\ndeal 0: 0\ndeal 1: 0\n", "dealt twice or never"),
        ("step v1\ndeal 0: 0 1\ndeal 1: 2\n", "replica 0 is dealt 2 documents"),
        ("step v1\ndeal 0: 0\ndeal 1: -\n", "replica 1 is dealt 0 documents"),
        ("step v1\ndeal 0: 0\ndeal 1: - 1\n", "expected 'deal 1: DOCUMENT ...'"),
        ("step v1\ndeal 0: -\ndeal 1: -\n", "no replica is dealt a document"),
        ("step v1\ndeal 0: 0\n", "2 plans for 1 replicas"),
    ],
)
def test_a_bad_step_is_named(head: str, error: str) -> None:
    body = "".join(
        f"plan v1\nreplica {r} of 2\ndocuments 5\nlayers 1\nchunk 0: 0[0:5]\nstage 0: F0 B0\n"
        for r in range(2)
    )
    assert Step.parse("step v1\ndeal 0: 1\ndeal 1: 0\n" + body).assignments == ((1,), (0,))
    assert error in refusal(PlanError, Step.parse, head + body)
