"""Placements by name and from files; what is wrong is said in one line with a picture."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.ir import PlanError
from megatron_epp.ir.placement import Placement, read_placement, require_last_stage
from tests.refusals import refusal


def read(text: str, ranks: int, file: str = "") -> Placement:
    return read_placement(text, ranks, lambda path: file)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("even", (0, 1, 2)),
        ("v", (2, 1, 0, 0, 1, 2)),
        ("interleaved 1", (0, 1, 2)),
        ("interleaved 3", (0, 1, 2, 0, 1, 2, 0, 1, 2)),
    ],
)
def test_names(text: str, place: tuple[int, ...]) -> None:
    made = read(text, 3)
    assert made == Placement(place) and made.is_even == (place == (0, 1, 2))
    assert made.ranks == 3 and made.stages == len(place)
    require_last_stage(made)


def test_files() -> None:
    by_stage = read("file", 2, "# a V\nplace 1 0 0 1\nlayers 3 2 2 1\n")
    by_rank = read("file", 2, "rank 1: 0 3   # both ends\nlayers 3 2 2 1\nrank 0: 1 2\n")
    assert by_stage == by_rank == Placement((1, 0, 0, 1), (3, 2, 2, 1))


@given(st.text(alphabet="placenkr 0123:\n", max_size=40))
def test_whatever_a_file_holds_is_a_placement_or_one_line(text: str) -> None:
    try:
        made = read("file", 3, text)
    except PlanError as refusal:
        assert "\n" not in str(refusal)
    else:
        assert set(made.place) == {0, 1, 2}


@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("place 0 1 1", "rank 2 has no stage; expected at least one: rank 0: 0 | rank 1: 1 2 | rank"
         " 2: -"),
        ("rank 0: 0 3\nrank 1: 1", "stage 2 is on no rank: rank 0: 0 3 | rank 1: 1 | rank 2: -"),
        ("rank 0: 0 1\nrank 1: 1 2\nrank 2: 3", "stage 1 is on several ranks: rank 0: 0 1 | rank"
         " 1: 1 2 | rank 2: 3"),
        ("place 0 1 2 7", "there is no rank 7: the pipeline has 3: rank 0: 0 | rank 1: 1 | rank 2: "
         "2 | rank 7: 3"),
        ("rank 0: 999999999999", "stages below 192: rank 0: 999999999999"),
        ("place 0 1 2\nlayers 4 4", "layers 4 4: expected at least one for each of 3 stages"),
        ("place 0 1 2\nlayers 4 0 4", "layers 4 0 4: expected at least one for each of 3 stages"),
        ("place 0 1 two", "line 1 ('place 0 1 two'): expected whole numbers"),
        ("stages 0 1 2", "line 1 ('stages 0 1 2'): expected 'place' and the rank of every stage"),
        ("", "expected one line 'place 1 0 0 1' with the rank of every stage, or a line 'rank 0"),
        ("place 0 1 2\nrank 0: 0", "expected one line 'place 1 0 0 1'"),
        ("rank 0: 0\nrank 0: 1", "line 2 ('rank 0: 1'): rank 0 has a line already"),
    ],
)  # fmt: skip
def test_errors(file: str, error: str) -> None:
    assert error in refusal(PlanError, read, "file", 3, file)


@pytest.mark.parametrize(
    "text", ["interleaved", "interleaved x", "interleaved 0", "interleaved 65"]
)
def test_names_with_numbers_that_cannot_be(text: str) -> None:
    with pytest.raises(PlanError, match="expected"):
        read(text, 3)


def test_megatron_wants_the_loss_on_its_last_rank() -> None:
    with pytest.raises(PlanError) as caught:
        require_last_stage(Placement((0, 1, 1, 0)))
    assert str(caught.value) == (
        "the last stage, 3, is on rank 0; expected rank 1, from which Megatron takes the loss: "
        "rank 0: 0 3 | rank 1: 1 2"
    )
