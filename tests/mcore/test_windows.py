"""Sliding windows and sinks under ``--epp``: broken on purpose, refused. More: test_experts.py."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_epp.certify.batches import Frame, draw, letters_drawn
from megatron_epp.certify.command import BatchVerdict
from megatron_epp.certify.trial import LLAMA
from megatron_epp.ir import slices_of
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from megatron_epp.mcore.kinds.window.certificate import WINDOW
from tests.mcore.runs import flags, train, write_corpus
from tests.mcore.sabotages import first_seed, judged_alone, require_shown

SABOTAGE = Path(__file__).with_name("sabotage_windows.py")
GPT_OSS = (
    f"{LLAMA} --num-layers 2 --window-size 127,0 --window-attn-skip-freq 2 "
    "--softmax-type learnable "
)
WAYS = (
    "nothing",
    "see one less",
    "see only the slice before",
    "drop gradients of tails",
    "forget the sinks",
    "nothing again",
)
FRAME = Frame(61, (2,), replicas=1, letters=letters_drawn(EXECUTABLE), splits=True)


def chained(number: int, seed: int) -> bool:
    """Whether a batch's plan has a slice shorter than the window between two others."""
    (plan,) = draw(seed, number, FRAME).step.plans
    slices = slices_of(plan)
    return any(
        slices.later[chunk] >= 0 and span.start > 0 and span.tokens < WINDOW
        for chunk in range(len(plan.chunks))
        for span in plan.chunks[chunk].spans
        if span.document == slices.document[chunk]
    )


@pytest.fixture(scope="module")
def judged() -> Mapping[str, BatchVerdict]:
    seed = first_seed(len(WAYS), lambda number, seed: number == 0 or chained(number, seed))
    return judged_alone(GPT_OSS, WAYS, seed, SABOTAGE)


@pytest.mark.parametrize("way", WAYS)
def test_wrong_windows_and_sinks_show_and_right_ones_pass(judged, way) -> None:
    require_shown(judged[way], way)


def test_windows_beyond_the_context_end_with_status_2(tmp_path) -> None:
    corpus = write_corpus(tmp_path / "documents", [30] * 12)
    run = train(
        flags(corpus, epp=True, pipeline_model_parallel_size=1, window_size="128,0"), processes=1
    )
    assert run.status == 2, run.output
    (line,) = run.errors
    assert line.endswith(
        "give --window-size W,0 with W from 1 to --seq-length less 1, or leave it out"
    )
