"""The certificate in fp8: plans against whole documents, both quantised."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.certify.batches import Frame, RandomBatch, modes_drawn
from megatron_epp.certify.command import BOUND, OWN_BOUND, QUANTISED_BOUND, BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import GPT, LLAMA, Trial
from megatron_epp.ir import slices_of
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from tests.certify.backend import certify_checked
from tests.certify.trial import CheckedTrial
from tests.engine.test_certificate import DEEPSEEK, ENGINE, EXPERTS, GROUPED, V3, by_command, models
from tests.mcore.certified import certified
from tests.mcore.fault_injection import first_seed, inject_alone, names

pytestmark = pytest.mark.gpu

FAULTS = Path(__file__).with_name("faults")
TABLE, OF_TENSORS = FAULTS / "fp8.py", FAULTS / "whole_tensors.py"
HYBRID = " --fp8-format hybrid --fp8-recipe blockwise"
E4M3 = " --fp8-format e4m3 --fp8-recipe blockwise"
MXFP8 = " --fp8-format e4m3 --fp8-recipe mxfp8"
TENSORS = " --fp8-format hybrid --fp8-recipe tensorwise"
HELD = " --use-distributed-optimizer --fp8-param-gather"
MTP_SEPARATOR = " --mtp-num-layers 1"
DENSE = f"{LLAMA} --num-layers 2{HYBRID}"

EVERY_DEGREE = {
    "one process": Trial(
        Degrees(1, 1, 1),
        models(
            DENSE,
            DEEPSEEK + GROUPED + HYBRID,
            EXPERTS + E4M3,
            V3 + MTP_SEPARATOR + E4M3,
            EXPERTS + GROUPED + TENSORS,
        ),
        batches=10,
    ),
    "tensor-parallel ranks": Trial(
        Degrees(1, 2, 1),
        models(
            f"{DENSE} --sequence-parallel",
            f"{LLAMA} --num-layers 2 --sequence-parallel{TENSORS}{HELD}",  # ranks have parts
        ),
        batches=2,
        overlap=True,
    ),
    "stages": Trial(
        Degrees(2, 1, 1),
        models(f"{GPT} --num-layers 4{E4M3}{HELD} --epp-vocab-parallel on"),
        batches=2,
    ),
}


@pytest.mark.parametrize("name", EVERY_DEGREE)
def test_random_plans_compute_what_the_plain_model_computes(name) -> None:
    lines, judged = certified(EVERY_DEGREE[name])
    assert "blockwise" in lines[1]
    # There is fp8, and cutting changes its smallest numbers: the guard can fail.
    assert max(batch.quantised_error or 0 for batch in judged) > 1e3 * BOUND


def test_mxfp8_by_the_command() -> None:
    """An environment that names no device is given one that knows the recipe. Weights are held in
    it, and gathered where gradients are added up."""
    flags = f"{LLAMA} --num-layers 2{ENGINE} --sequence-parallel{HELD}"
    flags += " --reuse-grad-buf-for-mxfp8-param-ag"
    first, *_, last = by_command(f"--tp 2 --batches 2 {flags}{MXFP8}")
    assert first.endswith(", b200)")
    shown = r"certified: 2 batches, worst error .*e-1[56] .*; of weights in fp8 .*e-0[67] \(bound"
    assert re.match(shown, last)


@pytest.mark.parametrize(
    ("loop", "fp8", "says"),
    [
        (False, MXFP8, "--fp8-recipe mxfp8: Device compute capability 10.0 or higher required"),
        (True, HYBRID, "--fp8-format: loops are not certified in fp8"),
        (False, " --fp8-format e4m3 --fp8-recipe delayed", "fp8 with scales of earlier tensors"),
    ],
    ids=["mxfp8 on an H100", "a loop", "a history"],
)
def test_what_is_not_certified_is_refused(loop, fp8, says) -> None:
    with pytest.raises(ValueError, match=says):
        certify_checked(
            CheckedTrial(Degrees(1, 1, 1), models(f"{LLAMA} --num-layers 2{fp8}"), loop=loop)
        )


# ------------------------------------------------------------------ faults

FRAME = Frame(61, (2,), replicas=1, modes=modes_drawn(EXECUTABLE))


def shows(fault: str, drawn: RandomBatch) -> bool:
    """Whether the batch's plan recomputes a layer, and has a chunk that no row is missing from."""
    (plan,) = drawn.step.plans
    again = any("f" in letters for letters in plan.recompute[0])
    return again and any(chunk.tokens % 16 for chunk in plan.chunks)


@pytest.fixture(scope="module")
def judged() -> dict[str, BatchVerdict]:
    return inject_alone(TABLE, DENSE + ENGINE, first_seed(TABLE, FRAME, shows))


@pytest.mark.parametrize("way", names(TABLE))
def test_whatever_is_broken_shows(judged, way) -> None:
    batch = judged[way]
    if "nothing" in way:
        assert batch.passed, batch
    elif way == "leave rows unpadded":
        assert "FP8 execution requires" in batch.problems[0]
    else:
        assert not batch.problems and batch.quantised_error > 1e3 * QUANTISED_BOUND, batch


def shows_of_tensors(way: str, drawn: RandomBatch) -> bool:
    """Whether the batch's plan has what is broken: slices, halves, packs."""
    (plan,) = drawn.step.plans
    if way == "lose what was set aside":
        return plan.splits_backward
    if way == "attend to other documents":
        return sum(len(chunk.spans) > 1 for chunk in plan.chunks) > 1
    return way != "drop returned gradients" or max(slices_of(plan).later) >= 0


def test_whatever_is_broken_exceeds_what_fp8_itself_is_off() -> None:
    """Scales of whole tensors, exactly where every document is computed alone: weights that stay as
    they were. Else no further from the plain model in fp8 than twice what that is from the plain
    model without."""
    seed = first_seed(OF_TENSORS, replace(FRAME, alone=16), shows_of_tensors)
    model = f"{LLAMA} --num-layers 2{TENSORS}{HELD}{ENGINE}"
    judged = inject_alone(OF_TENSORS, model, seed)
    assert judged["nothing"].bound == OWN_BOUND and judged["nothing"].gradient_error > 0.5
    assert judged["nothing, of documents alone"].bound == BOUND
    for way, batch in judged.items():
        assert not batch.problems and batch.bound in (BOUND, OWN_BOUND), batch
        if "nothing" in way:
            assert batch.passed, batch
        else:
            assert batch.gradient_error > (1.4 if batch.bound == OWN_BOUND else 1e9) * batch.bound
