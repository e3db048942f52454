"""Loops of others on real processes, against the plain model; and what a certificate notices."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_epp.mcore.certify.command import BOUND, GPT, LLAMA, Trial
from megatron_epp.mcore.certify.loops.command import (
    LoopJudged,
    certify_loop,
    loop_verdict,
    main,
)
from megatron_epp.mcore.certify.scale_down import Degrees
from tests.mcore.sabotages import stand_in_order

SABOTAGE = Path(__file__).with_name("loop_sabotage.py")
# In the order of loop_sabotage.WAYS, which only the rank itself can import.
WAYS = (
    "nothing",
    "return in the order run",
    "forget a gradient",
    "lose a slice for the loss",
    "scale by chunks",
    "drop returned gradients",
    "meet in between",
    "nothing again",
)


def models(*lines: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(line.split()) for line in lines)


def trial(degrees: Degrees, batches: int, **others) -> Trial:
    layers = f" --num-layers {2 * degrees.pp}"
    sequence = " --sequence-parallel" if degrees.tp > 1 else ""
    flags = models(LLAMA + layers + sequence, GPT + layers)
    return Trial(degrees, flags, batches, patience_seconds=90.0, **others)


@pytest.mark.parametrize(
    ("level", "degrees", "batches", "overlap"),
    [
        ("level0", Degrees(2, 1, 1), 6, False),
        ("level1", Degrees(2, 1, 2), 6, True),
    ],
)
def test_loops_compute_what_the_plain_model_computes(level, degrees, batches, overlap) -> None:
    lines: list[str] = []
    judged = certify_loop(trial(degrees, batches, overlap=overlap), level, lines.append)
    assert len(judged) == batches
    assert all(batch.passed for batch in judged), "\n".join(lines)
    assert {batch.loss for batch in judged} == {"tokens", "mean", "sequence"}
    assert sum(batch.halved for batch in judged) > 0
    assert (sum(batch.cut for batch in judged) > 0) == (level == "level1")
    for batch in judged:
        assert batch.messages == 2 * (degrees.pp - 1) * batch.chunks
        assert {"call", "plan text", "gradient reduction"} <= set(batch.collectives)
    assert "certified: " in loop_verdict(judged)
    assert "values in the caller's order" in loop_verdict(judged)


def test_the_command_line() -> None:
    with pytest.raises(ValueError, match="--loop level2: expected level0 or level1"):
        main(["--loop", "level2"])
    with pytest.raises(ValueError, match="--batches 0: expected at least 1"):
        main(["--loop", "level1", "--batches", "0"])


@pytest.fixture(scope="module")
def sabotaged() -> Mapping[str, LoopJudged]:
    """One stage, in slices; only batches with losses by micro-batch."""
    flags = models(f"{LLAMA} --num-layers 2")
    many = Trial(Degrees(1, 1, 1), flags, 2 * len(WAYS), interfere=SABOTAGE)
    judged = certify_loop(many, "level1")
    return dict(zip(WAYS, judged[: len(WAYS)], strict=True))


def test_the_ways_are_those_of_the_sabotage() -> None:
    assert stand_in_order(WAYS, SABOTAGE)


@pytest.mark.parametrize("way", ["nothing", "nothing again"])
def test_the_untouched_schedule_passes(sabotaged, way) -> None:
    assert sabotaged[way].passed and sabotaged[way].cut > 0, sabotaged[way]


def test_values_at_other_places_are_noticed(sabotaged) -> None:
    batch = sabotaged["return in the order run"]
    assert batch.value_error > 1e6 * BOUND and batch.gradient_error <= BOUND


@pytest.mark.parametrize("way", ["forget a gradient", "scale by chunks", "drop returned gradients"])
def test_wrong_gradients_are_far_beyond_the_bound(sabotaged, way) -> None:
    batch = sabotaged[way]
    assert batch.gradient_error > 1e6 * BOUND and batch.value_error <= BOUND, batch


def test_a_loss_of_other_outputs_is_noticed(sabotaged) -> None:
    assert sabotaged["lose a slice for the loss"].value_error > 1e6 * BOUND


def test_a_collective_that_is_not_on_the_list_is_refused(sabotaged) -> None:
    (problem,) = sabotaged["meet in between"].problems
    assert problem.startswith("not on the list: barrier over default_pg by ")
