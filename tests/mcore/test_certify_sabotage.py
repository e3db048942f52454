"""A certificate that cannot fail is none: every way to break the executor shows."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from megatron_epp.ir import slices_of
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from megatron_epp.mcore.certify.batches import Coverage, Drawn, Frame, draw, letters_drawn
from megatron_epp.mcore.certify.command import BOUND, LLAMA, Judged, Trial, certify
from megatron_epp.mcore.certify.scale_down import Degrees

SABOTAGE = Path(__file__).with_name("sabotage.py")
# In the order of sabotage.WAYS, which only the rank itself can import.
WAYS = (
    "nothing",
    "drop returned gradients",
    "shift positions",
    "lose border labels",
    "mistake border labels",
    "append again",
    "scale wrongly",
    "meet in between",
    "forget to free",
    "shift masks",
    "nothing again",
)
FRAME = Frame(61, (2,), replicas=1, letters=letters_drawn(EXECUTABLE), splits=True)


def fragile(way: str, drawn: Drawn) -> bool:
    """Whether the way must show: some document is cut; to append again, an earlier slice of it is
    recomputed; to lose a border's label, the label of such a slice's last row counts."""
    (plan,), (deal,) = drawn.step.plans, drawn.step.deals
    cut, later = slices_of(plan).document, slices_of(plan).later
    earlier = [chunk for chunk in range(len(plan.chunks)) if later[chunk] >= 0]
    if way == "append again":
        return any("f" in plan.recompute[0][chunk] for chunk in earlier)
    if way == "lose border labels":
        return any(
            span.document == cut[chunk] and drawn.loss_masks[deal[span.document]][span.stop - 1]
            for chunk in earlier
            for span in plan.chunks[chunk].spans
        )
    return bool(earlier)


@cache
def seed() -> int:
    """One whose batches are all fragile."""
    ways = list(enumerate(WAYS))
    return next(s for s in range(1_000) if all(fragile(w, draw(s, n, FRAME)) for n, w in ways))


@pytest.fixture(scope="module")
def judged() -> Mapping[str, Judged]:
    llama = tuple(f"{LLAMA} --num-layers 2".split())
    trial = Trial(Degrees(1, 1, 1), (llama,), len(WAYS), seed(), interfere=SABOTAGE)
    return dict(zip(WAYS, certify(trial), strict=True))


def test_the_ways_are_those_of_the_sabotage() -> None:
    source = SABOTAGE.read_text()
    listed = source[source.index("WAYS") :]
    names = [way.replace(" ", "_") for way in WAYS[1:-1]]
    places = [listed.index(name) for name in names]
    assert places == sorted(places)


def test_the_batches_are_those_that_were_looked_at(judged) -> None:
    for number, batch in enumerate(judged.values()):
        assert batch.coverage == Coverage.of(draw(seed(), number, FRAME).step)
        assert batch.coverage.cut > 0


@pytest.mark.parametrize("way", ["nothing", "nothing again"])
def test_the_untouched_executor_passes(judged, way) -> None:
    assert judged[way].passed, judged[way]


@pytest.mark.parametrize(
    "way",
    [
        "drop returned gradients",
        "shift positions",
        "lose border labels",
        "mistake border labels",
        "scale wrongly",
        "shift masks",
    ],
)
def test_wrong_numbers_are_far_beyond_the_bound(judged, way) -> None:
    batch = judged[way]
    assert not batch.passed and not batch.problems
    assert batch.gradient_error > 1e6 * BOUND, batch


def test_a_lost_label_is_a_lost_token(judged) -> None:
    assert judged["lose border labels"].loss_error == float("inf")


def test_dropped_gradients_leave_the_loss_alone(judged) -> None:
    assert judged["drop returned gradients"].loss_error <= BOUND


def test_keys_appended_again_are_refused(judged) -> None:
    (problem,) = judged["append again"].problems
    assert "rank 0: " in problem
    assert not judged["append again"].passed


def test_what_is_kept_behind_an_iteration_is_refused(judged) -> None:
    (problem,) = judged["forget to free"].problems
    assert "K/V buffers outlive the iteration" in problem


def test_a_collective_that_is_not_on_the_list_is_refused(judged) -> None:
    batch = judged["meet in between"]
    (problem,) = batch.problems
    assert problem.startswith("not on the list: barrier over default_pg by ")
    assert batch.gradient_error <= BOUND and not batch.passed
