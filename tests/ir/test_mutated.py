"""Mutated texts are refused in one line, or parse to something that prints as itself."""

import re
from collections.abc import Callable

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from megatron_epp.ir import Plan, PlanError, Step, check, parse_records
from megatron_epp.ir.placement import placement_of_file
from tests.plans import EXAMPLE, plans

STEP = (
    "step v1\ndeal 0: 2 0\ndeal 1: 1\n"
    "plan v1\nreplica 0 of 2\ndocuments 900 30\nlayers 1 1\nchunk 0: 0[0:500]\n"
    "chunk 1: 0[500:900] 1[0:30]\nstage 0: F0 F1 B1 B0\nstage 1: F0 F1 I1 I0 W1 W0\n"
    "plan v1\nreplica 1 of 2\ndocuments 70\nlayers 1 1\nchunk 0: 0[0:70]\nstage 0: F0 B0\n"
    "stage 1: F0 B0\n"
)
ALPHABET = "0123456789FBIWkfcmnabo[]:# \n\t-.eé\x00\x85\u2028plandocumentsstage"


@st.composite
def mutated(draw: st.DrawFn, text: str) -> str:
    """``text`` with one to four pieces changed, moved, doubled or lost."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        to = min(len(text), at + draw(st.sampled_from((1, 1, 1, 2, 8, 30))))
        new = st.text(ALPHABET, max_size=2) | st.sampled_from(("0", "1", "2", "9" * 7, "9" * 40))
        lines = text.split("\n")
        match draw(st.sampled_from(("replace", "double", "line", "swap", "cut"))):
            case "replace":
                text = text[:at] + draw(new) + text[to:]
            case "double":
                text = text[:at] + text[at:to] * 2 + text[to:]
            case "line":
                text = "\n".join(draw(st.permutations(lines))[:-1])
            case "swap":
                one, two = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
                lines[one], lines[two] = lines[two], lines[one]
                text = "\n".join(lines)
            case "cut":
                text = text[:at]
    return text


def is_accepted(text: str) -> bool:
    try:
        return text != EXAMPLE and bool(Plan.parse(text))
    except PlanError:
        return False


def test_some_mutations_are_other_plans_and_some_are_refused() -> None:
    """Else the tests below would prove nothing."""
    for accepted in (True, False):
        find(mutated(EXAMPLE), lambda text, accepted=accepted: is_accepted(text) == accepted)


@pytest.mark.parametrize(("parse", "sound"), [(Plan.parse, EXAMPLE), (Step.parse, STEP)])
@settings(max_examples=300)
@given(st.data())
def test_a_mutated_text(parse: Callable[[str], Plan | Step], sound: str, data) -> None:
    text = data.draw(mutated(sound))
    try:
        found = parse(text)
    except PlanError as error:
        assert str(error) and "\n" not in str(error)
        return
    assert parse(str(found)) == found
    for plan in [found] if isinstance(found, Plan) else found.plans:
        try:
            check(plan)
        except PlanError as error:
            assert str(error).splitlines()[0]


@pytest.mark.parametrize(
    ("parse", "sound"),
    [
        (Plan.parse, EXAMPLE),
        (Step.parse, STEP),
        (parse_records, "timed v1\n0 F0 0.0 1.0 5\n0 SEND:F0>1 1.0 2.0 0\n"),
        (lambda text: placement_of_file(text, 2), "place 0 1 layers 3 4"),
    ],
)
def test_every_word_that_is_too_long_is_quoted_in_short(parse: Callable, sound: str) -> None:
    for word in re.finditer(r"\S+", sound):
        with pytest.raises(PlanError) as caught:
            parse(f"{sound[: word.start()]}{'x' * 100_000}{sound[word.end() :]}")
        assert len(str(caught.value)) < 500


@given(plans(), st.data())
def test_a_mutated_drawn_plan(plan: Plan, data) -> None:
    try:
        found = Plan.parse(data.draw(mutated(str(plan))))
    except PlanError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert Plan.parse(str(found)) == found
