"""MoE, windows and sinks under ``--epp``: certified, with faults, resumed, repeated, refused."""

import json
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megatron_epp.certify.command import BOUND, BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA, Trial
from megatron_epp.mcore.certify.layer_selection import small_kinds
from megatron_epp.mcore.kinds.moe.certificate import MoECertificate
from megatron_epp.mcore.kinds.moe.kind import MoEKind
from tests.mcore.certified import certified
from tests.mcore.fault_injection import FAULTS, inject
from tests.mcore.models import QWEN3, TRAINED_MOE, WINDOWS
from tests.mcore.resumes import (
    Six,
    after_three,
    logged,
    require_megatrons_own_numbers,
    require_three_more_alike,
    six_of,
    tensors,
    to_megatron_and_back,
)
from tests.mcore.runs import flags, trained

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


# Slow: more batches of the same models.
@pytest.mark.parametrize("batches", [4, pytest.param(7, marks=pytest.mark.slow)])
def test_random_plans_compute_what_the_plain_model_computes(batches: int) -> None:
    """Experts spread over the ranks that share rows; groups of experts, a bias, shared experts and
    a dense layer in between; windows and sinks. Two stages of two ranks."""
    models = tuple((model + SPREAD).split() for model in (QWEN3, DEEPSEEK, GPT_OSS))
    trial = Trial(Degrees(pp=2, tp=2, dp=1), tuple(map(tuple, models)), batches, overlap=True)
    lines, judged = certified(trial)
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
    assert sum(batch.coverage.split for batch in judged) > 0
    assert sum(batch.coverage.packed for batch in judged) > 0
    assert sum(batch.coverage.selective for batch in judged) > 0
    assert sum(batch.coverage.halved for batch in judged) > 0
    exchanges = {"expert exchange", "expert gradient reduction", "tokens of documents per expert"}
    assert all(exchanges <= set(batch.coverage.collectives) for batch in judged)
    biased = [number % 3 == 1 for number in range(batches)]  # models have the batches in turn
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


# ------------------------------------------------------------------ faults


@pytest.fixture(scope="module")
def judged() -> Mapping[str, BatchVerdict]:
    """Two ranks that share rows and experts: rows are padded, counts and rows are exchanged."""
    model = (
        QWEN3 + "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    ).replace("--num-layers 4", "--num-layers 2")
    trial = Trial(Degrees(1, 1, 1, cp=2), (tuple(model.split()),), seed=1)
    return inject(FAULTS / "moe.py", trial)


@pytest.mark.parametrize("way", ["nothing", "nothing again"])
def test_untouched_routers_pass(judged, way) -> None:
    assert judged[way].passed, judged[way]


@pytest.mark.parametrize("way", ["count padding", "count again"])
def test_tokens_that_count_too_often_show(judged, way) -> None:
    """In all: which experts they choose is another matter once the bias is off."""
    totals = [
        re.search(r"counted other tokens: (\d+) in all where the plain model has (\d+)", line)
        for line in judged[way].routing
    ]
    assert any(found and int(found[1]) > int(found[2]) for found in totals), judged[way]


@pytest.mark.parametrize("way", ["mix documents", "sum too early", "forget the state"])
def test_losses_of_other_documents_show(judged, way) -> None:
    batch = judged[way]
    assert not batch.problems and batch.loss_error <= BOUND
    assert batch.gradient_error > 1e6 * BOUND, batch


def test_losses_for_the_log_are_compared(judged) -> None:
    """Of other documents' lengths both are other averages."""
    lines = judged["mix documents"].routing
    assert any(line.startswith("load_balancing_loss of layer ") for line in lines)
    assert any(line.startswith("z_loss of layer ") for line in lines)


def test_a_bias_that_moved_twice_shows(judged) -> None:
    batch = judged["move the bias twice"]
    assert not batch.problems and not batch.routing and batch.loss_error <= BOUND
    assert "expert_bias" in batch.parameter and batch.gradient_error > 1e6 * BOUND


# ------------------------------------------------------------------ inside the trainer

EXPERTS = {
    **TRAINED_MOE,
    "moe_router_bias_update_rate": 0.1,
    "window_size": "16,0",
    "window_attn_skip_freq": 2,
    "softmax_type": "learnable",
}


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> Six:
    return six_of(tmp_path_factory.mktemp("six"), EXPERTS)


@pytest.fixture
def corpus(six) -> Path:
    return six.job.corpus


def test_three_and_three_are_six_bit_for_bit(six, tmp_path) -> None:
    saved = require_three_more_alike(six, tmp_path)
    assert any("experts" in name and "exp_avg" in name for name in saved)
    # After three iterations: a bias that goes to and fro is back where it was after six.
    third = tensors(six.folder / "iter_0000003", tmp_path / "third.pt")
    biases = [name for name in third if name.endswith(("expert_bias", "softmax_offset"))]
    assert len(biases) >= 2 and not [name for name in biases if not third[name].any()]


def test_checkpoints_load_both_ways(six, tmp_path) -> None:
    to_megatron_and_back(six.job, after_three(six.folder, tmp_path))


def test_equal_documents_give_megatrons_own_numbers(tmp_path) -> None:
    """Auxiliary losses, too."""
    model = {**EXPERTS, "pipeline_model_parallel_size": 1}
    losses = dict.fromkeys(("seq_load_balancing_loss", "z_loss"), 1e-5)
    require_megatrons_own_numbers(tmp_path, model, others=losses)


def test_an_iteration_that_is_repeated_moves_the_bias_once(corpus, tmp_path) -> None:
    """One rank finds no memory in iteration 2, once: losses and biases are those of a run in which
    nothing failed."""
    shared = {
        **EXPERTS,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "save_interval": 3,
    }
    words = flags(corpus, epp=True, save=tmp_path / "free", **shared)
    free = trained(words)
    program = (str(Path(__file__).parent / "hungry.py"), "together")
    hit = trained(flags(corpus, epp=True, save=tmp_path / "hit", **shared), program=program)
    assert "repeated with less memory" in hit.output
    assert hit.losses == pytest.approx(free.losses, rel=1e-5)
    one, other = (
        tensors(tmp_path / which / "iter_0000003", tmp_path / f"{which}.pt")
        for which in ("free", "hit")
    )
    biases = [name for name in one if name.endswith("expert_bias")]
    assert biases
    for name in biases:
        assert torch.equal(one[name], other[name]), name
    for run in (free, hit):
        assert len(logged("z_loss", run.output)) == 3
    assert logged("z_loss", hit.output) == pytest.approx(logged("z_loss", free.output), rel=1e-5)


@pytest.mark.slow
def test_a_cost_model_is_measured_with_experts(six) -> None:
    """The calibration runs routers and leaves nothing in them; it knows no borders of slices."""
    run = six.job.train(epp=True, epp_cost_model=None, train_iters=1)
    assert run.losses == pytest.approx(six.run.losses[:1], rel=1e-5)
    (ours,), (theirs, *_) = (logged("z_loss", one.output) for one in (run, six.run))
    assert ours == pytest.approx(theirs, rel=1e-5)


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"num_experts": 6, "expert_model_parallel_size": 4},
            "--num-experts 6: does not divide over --expert-model-parallel-size 4; expected a "
            "multiple of it",
        ),
        (
            {"num_experts": 4},
            "--moe-router-topk 8: expected 1 to 4, the number of --num-experts",
        ),
        (
            {"num_experts": 12, "moe_router_num_groups": 5},
            "--num-experts 12: does not divide into --moe-router-num-groups 5; expected a multiple "
            "of it",
        ),
    ],
)
def test_experts_that_do_not_divide_are_one_line(changes, says) -> None:
    MoEKind().require(given(), 1)
    with pytest.raises(ValueError) as error:
        MoEKind().require(given(**changes), 1)
    assert str(error.value) == says


# ------------------------------------------------------------------ scaled down


def given(**changes) -> Namespace:
    args = Namespace(
        num_experts=128,
        moe_router_topk=8,
        expert_model_parallel_size=1,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_ffn_hidden_size=768,
        moe_shared_expert_intermediate_size=None,
        moe_latent_size=None,
        hidden_size=2048,
        moe_layer_freq=1,
        window_size=None,
        window_attn_skip_freq=None,
        no_rope_freq=None,
        num_layers=8,
    )
    vars(args).update(changes)
    return args


def test_experts_are_scaled_down_with_their_structure() -> None:
    made = MoECertificate().small(given(), 64, 1, 8)
    assert made == {"num_experts": 8, "moe_router_topk": 4, "moe_ffn_hidden_size": 24}
    latents = given(moe_latent_size=512)
    assert MoECertificate().small(latents, 64, 1, 8) == {**made, "moe_latent_size": 16}
    groups = given(num_experts=256, moe_router_num_groups=8, moe_router_group_topk=4)
    grouped = MoECertificate().small(groups, 64, 1, 8)
    assert grouped["moe_router_num_groups"] == 4 and grouped["moe_router_group_topk"] == 2
    assert grouped["moe_router_topk"] == 4 and grouped["num_experts"] % 4 == 0
    assert MoECertificate().small(given(num_experts=None), 64, 1, 8) == {}


@pytest.mark.parametrize(
    ("frequency", "kept"),
    [([0] * 3 + [1] * 5, [0, 1, 1, 1]), (2, [1, 0, 1, 0]), ([0] * 4 + [1] * 4, [0, 0, 1, 1])],
)
def test_a_stage_keeps_both_kinds_of_its_layers(frequency, kept) -> None:
    assert small_kinds(given(moe_layer_freq=frequency), [4, 4], [2, 2])["moe_layer_freq"] == kept


def test_layers_are_kept_that_differ_most() -> None:
    """Of three kinds in a stage of which two are kept: with and without experts, and positions."""
    made = small_kinds(given(moe_layer_freq=[0, 1] * 4, no_rope_freq=4), [4, 4], [2, 2])
    assert made == {"moe_layer_freq": [0, 1, 0, 1], "no_rope_freq": [0, 1, 0, 1]}


def test_a_pattern_of_other_length_is_one_line() -> None:
    with pytest.raises(ValueError) as error:
        small_kinds(given(moe_layer_freq=[0, 1]), [8], [2])
    assert str(error.value) == "--moe-layer-freq: 2 layers; expected --num-layers, 8"
