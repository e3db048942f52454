"""A certificate that cannot fail is none: every fault of the executor shows."""

import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache

import pytest

from megatron_epp.certify.batches import (
    Frame,
    RandomBatch,
    StepCoverage,
    draw,
    modes_drawn,
    most_offloaded,
)
from megatron_epp.certify.command import BOUND, BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA, Trial
from megatron_epp.ir import Step, slices_of
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from tests.certify.backend import certify_checked
from tests.mcore.fault_injection import FAULTS, names

pytestmark = pytest.mark.everything

TABLE = FAULTS / "executor.py"
WAYS = names(TABLE)
HOST = ("leave layers where they are", "lay one layer aside at a time")
ROUNDS = 2  # batches of each way to choose from
FRAME = Frame(61, (2,), replicas=1, modes=modes_drawn(EXECUTABLE), splits=True)


def fragile(way: str, drawn: RandomBatch) -> bool:
    """Whether the way must show: some document is cut; to append again, an earlier slice of it is
    recomputed; to lose a border's label, the label of such a slice's last row counts."""
    (plan,), (deal,) = drawn.step.plans, drawn.step.assignments
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


def offloads_two(step: Step) -> bool:
    """Whether two layers that are worth it lie in the host's memory at a time."""
    (plan,) = step.plans
    return most_offloaded(plan, 0, lambda chunk: chunk.tokens > 1) > 1


def shows(way: str, drawn: RandomBatch) -> bool:
    if way in (*HOST, "reuse host memory"):
        return offloads_two(drawn.step)
    return way.startswith("nothing") or fragile(way, drawn)


def numbers(seed: int) -> Mapping[str, int]:
    """By way, the first batch that is computed so in which it must show."""
    found = {}
    for way, name in enumerate(WAYS):
        for number in range(way, ROUNDS * len(WAYS), len(WAYS)):
            if shows(name, draw(seed, number, FRAME)):
                found[name] = number
                break
    return found


@cache
def chosen() -> tuple[int, Mapping[str, int]]:
    """A seed in whose batches every way must show, and the numbers of those batches."""
    return next((seed, found) for seed in range(1_000) if len(found := numbers(seed)) == len(WAYS))


@pytest.fixture(scope="module")
def judged() -> Mapping[str, BatchVerdict]:
    llama = tuple(f"{LLAMA} --num-layers 2".split())
    seed, found = chosen()
    trial = Trial(Degrees(1, 1, 1), (llama,), max(found.values()) + 1, seed, interfere=TABLE)
    every = certify_checked(trial)
    return {way: every[number] for way, number in found.items()}


def test_the_batches_are_those_that_were_looked_at(judged) -> None:
    seed, found = chosen()
    for way, number in found.items():
        drawn = draw(seed, number, FRAME)
        counted = StepCoverage.of(drawn)
        for one in fields(counted):
            assert getattr(judged[way].coverage, one.name) == getattr(counted, one.name)
        assert judged[way].coverage.cut > 0 or not fragile(way, drawn)


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
        "reuse host memory",
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


@pytest.mark.parametrize("way", HOST)
def test_layers_that_stay_on_the_device_are_refused(judged, way) -> None:
    """All of them, or all but one at a time; the numbers are none the worse."""
    batch = judged[way]
    (problem,) = batch.problems
    taken, planned = map(int, re.findall(r"(\d+) (?:bytes were|layers)", problem))
    assert bool(taken) == (way == "lay one layer aside at a time") and planned > 1
    assert batch.gradient_error <= BOUND and not batch.passed


def test_a_collective_that_is_not_on_the_list_is_refused(judged) -> None:
    batch = judged["meet in between"]
    (problem,) = batch.problems
    assert problem.startswith("not on the list: barrier over default_pg by ")
    assert batch.gradient_error <= BOUND and not batch.passed
