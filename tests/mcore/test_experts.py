"""MoE, windows and sinks under ``--epp``: certified."""

import json

import pytest

from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA, Trial
from tests.mcore.certified import certified
from tests.mcore.models import QWEN3, WINDOWS
from tests.mcore.runs import trained

pytestmark = pytest.mark.everything

DEEPSEEK = (
    f"{LLAMA} --num-layers 4 --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 352 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 "
    "--moe-shared-expert-intermediate-size 704 --moe-router-num-groups 8 "
    "--moe-router-group-topk 3 --moe-router-topk-scaling-factor 2.5 --moe-layer-freq ([0]*1+[1]*3) "
    "--moe-latent-size 256 "
)
GPT_OSS = (
    f"{LLAMA} --num-layers 4 {WINDOWS} --num-experts 32 --moe-router-topk 4 "
    "--moe-ffn-hidden-size 1024 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.9 "
).replace("--disable-bias-linear ", "")
SPREAD = " --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"


def test_random_plans_compute_what_the_plain_model_computes() -> None:
    """Experts spread over the ranks that share rows; groups of experts, a bias, shared experts and
    a dense layer in between; windows and sinks. Two stages of two ranks."""
    models = tuple((model + SPREAD).split() for model in (QWEN3, DEEPSEEK, GPT_OSS))
    trial = Trial(Degrees(pp=2, tp=2, dp=1), tuple(map(tuple, models)), batches=4, overlap=True)
    lines, judged = certified(trial, "split", "packed", "selective", "halved")
    described = [line for line in lines if line.startswith("PP 2")]
    for said, line in zip(
        (
            "8 experts, 4 of a token, over 2 ranks, softmax, aux_loss, z-loss",
            "shared experts, latents of 16, 4 groups, expert bias, seq_aux_loss, layers deee",
            "learnable sinks, windows of 7 tokens before each in layers wfwf",
        ),
        described,
        strict=True,
    ):
        assert said in line
    exchanges = {"expert exchange", "expert gradient reduction", "tokens of documents per expert"}
    assert all(exchanges <= set(batch.coverage.collectives) for batch in judged)
    biased = [number % 3 == 1 for number in range(4)]  # models have the batches in turn
    judged.sort(key=lambda batch: batch.number)
    assert [batch.coverage.collectives["expert bias"] > 0 for batch in judged] == biased


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_a_layer_of_experts_references_nothing_of_a_chunk_that_is_done(dispatcher: str) -> None:
    """Else the graph of the router's probabilities keeps the layer's input and its gradient until
    the layer's next chunk, and calibration measures bytes below 0."""
    run = trained([dispatcher], processes=1, program=("-m", "tests.mcore.after_chunk"))
    left = json.loads(run.output.splitlines()[-1])
    assert left.pop("undropped") >= 3
    assert left == dict.fromkeys("kfme", 0)
