"""Latent attention under ``--epp``: certified, trained, broken on purpose, refused."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_epp.certify.batches import Frame, draw, letters_drawn
from megatron_epp.certify.command import BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import Trial
from megatron_epp.ir import slices_of
from megatron_epp.layers.recompute.wrap import EXECUTABLE, OF_LATENTS
from megatron_epp.mcore.model.kinds.latents import MegatronLatents
from tests.mcore.certified import certified
from tests.mcore.resumes import (
    Job,
    Six,
    require_megatrons_own_numbers,
    require_three_more_alike,
    six_iterations,
)
from tests.mcore.runs import flags, train, write_corpus
from tests.mcore.sabotages import first_seed, judged_alone, require_shown

SABOTAGE = Path(__file__).with_name("sabotage_latents.py")
LATENTS = (
    "--hidden-size 1024 --num-attention-heads 16 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --multi-latent-attention --kv-lora-rank 256 "
    "--qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 96 --qk-layernorm "
)
# DeepSeek-V3's: queries have a latent, YaRN's stretch is in the scale.
V3 = f"{LATENTS} --q-lora-rank 384 --rotary-scaling-factor 40 --mscale-all-dim 1.0 "
# V2-Lite's: they have none, and a norm in front of their projection.
LITE = f"{LATENTS} --rope-type rope --apply-layernorm-1p "
EXPERTS = (
    "--num-experts 64 --moe-router-topk 8 --moe-layer-freq [0]+[1]*3 --moe-ffn-hidden-size 256 "
    "--moe-shared-expert-intermediate-size 256 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall "
)

EVERY_DEGREE = {
    "tensor-parallel stages": Trial(
        Degrees(pp=2, tp=2, dp=1),
        tuple(
            tuple(line.split())
            for line in (f"{V3} --num-layers 4 --sequence-parallel", f"{LITE} --num-layers 4")
        ),
        batches=8,
    ),
    "context parallelism": Trial(
        Degrees(pp=1, tp=1, dp=1, cp=2), (tuple(f"{V3} --num-layers 2".split()),), batches=4
    ),
    "experts": Trial(
        Degrees(pp=2, tp=1, dp=2),
        (tuple(f"{V3} {EXPERTS} --num-layers 4".split()),),
        batches=4,
        overlap=True,
    ),
}


@pytest.mark.parametrize("name", EVERY_DEGREE)
def test_random_plans_compute_what_the_plain_model_computes(name) -> None:
    """One batch keeps K and V, the next one latents."""
    trial = EVERY_DEGREE[name]
    lines, judged = certified(trial)
    assert sum(batch.coverage.cut for batch in judged[::2]) > 0
    assert sum(batch.coverage.cut for batch in judged[1::2]) > 0
    assert "latents of " in lines[0]


# Attention of GPUs as certify has it there, on a host without any.
EXACT = """
from megatron_epp.mcore.certify.rank import exact_attention
from megatron_epp.mcore.trainer.hooks import TrainerHooks
HOOKS = TrainerHooks(attention_for=exact_attention)
"""


@pytest.mark.parametrize("cp", [1, 2])
def test_latent_attention_by_the_kernels_of_gpus(cp, tmp_path) -> None:
    exact = tmp_path / "exact.py"
    exact.write_text(EXACT)
    model = tuple(f"{V3} --num-layers 2 --epp-mla-keeps expanded".split())
    trial = Trial(Degrees(1, 1, 1, cp=cp), (model,), batches=4, interfere=exact)
    _, judged = certified(trial)
    assert sum(batch.coverage.cut for batch in judged) > 0


# ------------------------------------------------------------------ broken on purpose

WAYS = (
    "nothing",
    "scale by kv channels",
    "turn by the row",
    "lose gradients of latents",
    "lose gradients of rotated keys",
    "lose the weight s share",
    "forget a block",
    "make it again wrongly",
    "nothing again",
)
FRAME = Frame(61, (2,), replicas=1, letters=letters_drawn(EXECUTABLE + OF_LATENTS), splits=True)


def fragile(number: int, seed: int) -> bool:
    """Whether a batch's plan has a slice behind a border, and recomputes an up-projection."""
    (plan,) = draw(seed, number, FRAME).step.plans
    chunks = range(len(plan.chunks))
    cut = any(slices_of(plan).later[chunk] >= 0 for chunk in chunks)
    return cut and any(OF_LATENTS in plan.recompute[0][chunk] for chunk in chunks)


@pytest.fixture(scope="module")
def judged() -> Mapping[str, BatchVerdict]:
    model = f"{V3} --num-layers 2 --epp-mla-keeps latents"
    return judged_alone(model, WAYS, first_seed(len(WAYS), fragile), SABOTAGE)


@pytest.mark.parametrize("way", WAYS)
def test_wrong_latents_show_and_right_ones_pass(judged, way) -> None:
    require_shown(judged[way], way)


# ------------------------------------------------------------------ trained

MODEL = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 12,
    "qk_layernorm": True,
    "apply_layernorm_1p": True,
    "rotary_scaling_factor": 4,
    "mscale_all_dim": 1.0,
}
LENGTHS = [400, 30, 20, 90, 12, 60, 300, 8, 40, 33, 120, 77] * 4


def latent_flags(corpus: Path, **changes: object) -> list[str]:
    words = flags(corpus, **(MODEL | changes))
    at = words.index("--group-query-attention")  # and its number of groups behind it
    return words[:at] + words[at + 3 :]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "documents", LENGTHS)
    return Job(corpus, {"epp_mla_keeps": "latents"}, words=latent_flags)


@pytest.fixture(scope="module")
def six(job, tmp_path_factory) -> Six:
    return six_iterations(job, tmp_path_factory.mktemp("six"))


def test_three_and_three_are_six_bit_for_bit(six, tmp_path) -> None:
    saved = require_three_more_alike(six, tmp_path)
    # As Transformer Engine's layers name them.
    assert any(name.endswith("linear_kv_up_proj.layer_norm_weight") for name in saved)


def test_equal_documents_give_megatrons_own_numbers(tmp_path) -> None:
    """With Megatron's own projections and attention."""
    one = {"pipeline_model_parallel_size": 1}
    require_megatrons_own_numbers(tmp_path, one, words=latent_flags)


def test_latents_beside_windows_end_with_status_2(job) -> None:
    wrong = {"window_size": "16,0", "epp_mla_keeps": "latents"}
    how = {"train_iters": 1, "pipeline_model_parallel_size": 1}
    run = train(latent_flags(job.corpus, epp=True, **wrong, **how), processes=1)
    assert run.status == 2, run.output
    (line,) = run.errors
    assert line.endswith(
        "--epp-mla-keeps latents: layers with windows keep the ends of slices, in K and V; leave "
        "the flag out"
    )


# ------------------------------------------------------------------ scaled down, refused


def sizes(**others) -> Namespace:
    given = {
        "multi_latent_attention": True,
        "hidden_size": 7168,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "transformer_impl": "local",
    }
    return Namespace(**(given | others))


def test_the_small_model_has_the_heads_proportions() -> None:
    assert MegatronLatents().small(sizes(), 64, 2, 8) == {
        "q_lora_rank": 14,
        "kv_lora_rank": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
    }
    assert (
        MegatronLatents().small(sizes(v_head_dim=192, q_lora_rank=None), 64, 1, 8)["v_head_dim"]
        == 12
    )
    assert "q_lora_rank" not in MegatronLatents().small(sizes(q_lora_rank=None), 64, 1, 8)
    assert MegatronLatents().small(Namespace(multi_latent_attention=False), 64, 1, 8) == {}


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"kv_lora_rank": 0}, "--kv-lora-rank 0: expected at least 1"),
        ({"qk_pos_emb_head_dim": 3}, "--qk-pos-emb-head-dim 3: expected a multiple of 2"),
        (
            {"kv_lora_rank": 511},
            "--kv-lora-rank 511 and --qk-pos-emb-head-dim 64: 575 channels do not divide over "
            "--tensor-model-parallel-size 2; expected a multiple of it",
        ),
        (
            {"q_lora_rank": 1535},
            "--q-lora-rank 1535: does not divide over --tensor-model-parallel-size 2; expected a "
            "multiple of it",
        ),
    ],
)
def test_sizes_that_cannot_be(wrong, line) -> None:
    with pytest.raises(ValueError) as refusal:
        MegatronLatents().small(sizes(**wrong), 64, 2, 8)
    assert str(refusal.value) == line
