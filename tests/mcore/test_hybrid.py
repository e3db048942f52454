"""HybridModel under ``--epp``: certified, broken on purpose, trained, refused."""

import re
from argparse import Namespace
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_epp.ir import slices_of
from megatron_epp.layers.recompute.wrap import EXECUTABLE, OF_EXPERTS
from megatron_epp.mcore.calibrate.command import _layers, _one_of_each_kind
from megatron_epp.mcore.certify.batches import Frame, draw, letters_drawn
from megatron_epp.mcore.certify.command import BOUND, LLAMA, Judged, Trial, certify, verdict
from megatron_epp.mcore.certify.scale_down import Degrees
from megatron_epp.mcore.certify.scaled.layer_kinds import small_kinds
from megatron_epp.mcore.model.hybrid.pattern import (
    layers_of_stages,
    refuse_segments,
    require_pattern,
)
from megatron_epp.mcore.model.shape import layer_shapes, model_shape
from tests.mcore.runs import Run, flags, train, write_corpus
from tests.mcore.sabotages import judged_alone, stand_in_order
from tests.mcore.test_training import (
    OPTIMIZER,
    STOCK_ON_DOCUMENTS,
    after_three,
    first_and_third,
    tensors,
    to_megatron_and_back,
)

PROGRAM = ("-m", "megatron_epp.pretrain_hybrid")
SABOTAGE = Path(__file__).with_name("sabotage_hybrid.py")
EXPERTS = (
    "--num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 256 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-z-loss-coeff 1e-3 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1 "
)
LATENTS = (
    "--hidden-size 1024 --num-attention-heads 16 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --kv-lora-rank 256 --q-lora-rank 384 "
    "--qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 96 --qk-layernorm "
)
SPREAD = "--sequence-parallel --expert-model-parallel-size 2 "


def words(model: str, pattern: str) -> tuple[tuple[str, ...], ...]:
    return ((*model.split(), f"--hybrid-layer-pattern={pattern}"),)


EVERY_DEGREE = {
    "one stage": Trial(
        Degrees(pp=1, tp=1, dp=1), words(f"{LLAMA} {EXPERTS} --qk-layernorm", "*-*E*-"), batches=4
    ),
    "tensor-parallel stages": Trial(
        Degrees(pp=2, tp=2, dp=1), words(f"{LLAMA} {EXPERTS} {SPREAD}", "*-*E*-*E*-"), batches=4
    ),
    # In turn with its words over the stages.
    "four stages, tied, latents, one without attention": Trial(
        Degrees(pp=4, tp=1, dp=1),
        words(LATENTS, "+-|+|-+|--") + words(f"{LATENTS} --epp-vocab-parallel on", "+-|+|-+|--"),
        batches=4,
        overlap=True,
    ),
}


@pytest.mark.parametrize("name", EVERY_DEGREE)
def test_random_plans_compute_what_the_plain_model_computes(name) -> None:
    trial = EVERY_DEGREE[name]
    lines: list[str] = []
    judged = certify(trial, lines.append)
    assert len(judged) == trial.batches
    assert all(batch.passed for batch in judged), "\n".join([*lines, verdict(judged)])
    assert "HybridModel " in lines[0]
    for what in ("packed", "split", "selective", "offloaded", "halved"):
        assert sum(getattr(batch.coverage, what) for batch in judged) > 0, what


# ------------------------------------------------------------------ broken on purpose

WAYS = (
    "nothing",
    "forget the last norm",
    "attend to another layers",
    "turn by the row",
    "nothing again",
)
FRAME = Frame(61, (6,), replicas=1, letters=letters_drawn(EXECUTABLE + OF_EXPERTS), splits=True)


@cache
def seed() -> int:
    """One whose batches all have a document of three slices or more: the first attention layer
    keeps what others must not see."""

    def fragile(number: int, seed: int) -> bool:
        (plan,) = draw(seed, number, FRAME).step.plans
        return max(slices_of(plan).later) >= 0

    return next(s for s in range(10_000) if all(fragile(n, s) for n in range(len(WAYS))))


@pytest.fixture(scope="module")
def judged() -> Mapping[str, Judged]:
    """Without the bias that moves with every batch, sabotaged ones, too."""
    experts = EXPERTS.replace("--moe-router-enable-expert-bias ", "")
    ((*model,),) = words(f"{LLAMA} {experts}", "*-*E*-")
    return judged_alone(" ".join(model), WAYS, seed(), SABOTAGE)


def test_the_ways_are_those_of_the_sabotage() -> None:
    assert stand_in_order(WAYS, SABOTAGE)


@pytest.mark.parametrize("way", ["nothing", "nothing again"])
def test_the_untouched_model_passes(judged, way) -> None:
    assert judged[way].passed, judged[way]


@pytest.mark.parametrize("way", [way for way in WAYS if "nothing" not in way])
def test_wrong_layers_show(judged, way) -> None:
    batch = judged[way]
    assert not batch.passed and not batch.problems, batch
    assert batch.gradient_error > 1e6 * BOUND, batch


# ------------------------------------------------------------------ trained

LENGTHS = [97, 3, 40, 260, 9, 12, 65, 30, 2, 128, 129, 21, 5, 77, 18, 150, 33, 8, 61, 11]
MODEL = {
    "hybrid_layer_pattern": "*-E|*E-",
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", LENGTHS)


@pytest.fixture(scope="module")
def six(corpus, tmp_path_factory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("six")
    how = {"train_iters": 6, "save": folder, "save_interval": 3}
    run = train(flags(corpus, epp=True, **how, **MODEL, **OPTIMIZER), program=PROGRAM)
    assert run.status == 0, run.output
    return folder, run


def test_three_and_three_are_six_bit_for_bit(corpus, six, tmp_path) -> None:
    folder, straight = six
    places = {"load": after_three(folder, tmp_path), "save": tmp_path / "resumed"}
    how = {"train_iters": 6, "save_interval": 6, **places}
    resumed = train(flags(corpus, epp=True, **how, **MODEL, **OPTIMIZER), program=PROGRAM)
    assert resumed.status == 0, resumed.output
    assert first_and_third(resumed.losses) == first_and_third(straight.losses[3:])
    mine = tensors(tmp_path / "resumed" / "iter_0000006", tmp_path / "a.pt")
    theirs = tensors(folder / "iter_0000006", tmp_path / "b.pt")
    assert mine.keys() == theirs.keys() and any("exp_avg" in name for name in mine)
    # As Transformer Engine's layers name them, which Megatron builds on GPUs.
    weights = {name.removeprefix(".") for name in mine if "exp_avg" not in name}
    for key in (
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.2.pre_mlp_layernorm.weight",
        "decoder.final_norm.weight",
    ):
        assert any(name.endswith(key) for name in weights), (key, sorted(weights))
    for name in (name for name in mine if mine[name].is_floating_point()):
        assert torch.equal(mine[name], theirs[name]), name


def test_checkpoints_load_both_ways(corpus, six, tmp_path) -> None:
    folder, _ = six
    to_megatron_and_back(corpus, after_three(folder, tmp_path), program=PROGRAM, **MODEL)


def test_equal_documents_give_megatrons_own_numbers(tmp_path) -> None:
    """Losses, auxiliary ones too, of Megatron's own schedule with one document a micro-batch."""
    corpus = write_corpus(tmp_path / "equal", [65] * 24)
    sizes = {"seq_length": 64, "max_position_embeddings": 64, "train_iters": 4}
    one = {"pipeline_model_parallel_size": 1, "hybrid_layer_pattern": "*-E*--"}
    common = {**sizes, **MODEL, **one}
    elastic = train(flags(corpus, epp=True, **common), processes=1, program=PROGRAM)
    assert elastic.status == 0, elastic.output
    own = {"micro_batch_size": 1, "calculate_per_token_loss": True, "dataloader_type": "single"}
    stock = train(flags(corpus, **own, **common), program=STOCK_ON_DOCUMENTS, processes=1)
    assert stock.status == 0, stock.output
    assert len(stock.losses) == 4
    assert elastic.losses == pytest.approx(stock.losses, rel=2e-6)
    assert elastic.grad_norms == pytest.approx(stock.grad_norms, abs=2e-3)
    for name in ("seq_load_balancing_loss", "z_loss"):
        ours, theirs = (
            [float(x) for x in re.findall(rf"(?<![a-z_]){name}: ([0-9.E+-]+)", run.output)]
            for run in (elastic, stock)
        )
        assert len(ours) == 4 and ours == pytest.approx(theirs, rel=1e-5)


# ------------------------------------------------------------------ patterns


def given(pattern: str | None, stages: int = 1, **others) -> Namespace:
    wanted = {
        "hybrid_layer_pattern": pattern,
        "pipeline_model_parallel_size": stages,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "num_experts": None,
    }
    return Namespace(**(wanted | others))


def test_layers_of_stages_are_as_megatron_places_them() -> None:
    assert layers_of_stages(given("*-*-", 2)) == (2, 2)
    assert layers_of_stages(given("*-*|-", 2)) == (3, 1)
    assert layers_of_stages(given("*-|", 2)) == (2, 0)
    ends = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}
    assert layers_of_stages(given("*-*-*-*-", 4, **ends)) == (1, 2, 2, 3)
    require_pattern(given(None))
    require_pattern(given("*-E", num_experts=8))
    require_pattern(given(None, hybrid_override_pattern="*-"))
    require_pattern(given("*-|*-|*-|*-", 2))  # Megatron's own schedule interleaves them


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (given("*-x"), "--hybrid-layer-pattern *-x: 'x' stands for no layer; expected a letter"),
        (given(None, hybrid_override_pattern="?"), "'?' stands for no layer"),
        (given("|", 2), "--hybrid-layer-pattern |: no layer; expected a letter"),
        (given("*+-"), "attention (*) and latent attention (+) in one model"),
        (given("*E"), "layers of experts (E), and --num-experts is not given; expected both"),
        (given("*-", num_experts=8), "no layer of experts (E), and --num-experts 8"),
        (
            given("*-*-*", 2),
            "5 layers, of which 5 are left for 2 of --pipeline-model-parallel-size 2 stages; "
            "expected the same number for each, or | between the stages in the pattern",
        ),
        (
            given("*-|*|-", 2),
            "3 segments for --pipeline-model-parallel-size 2; expected 2, one for each stage",
        ),
        (given("*|-", 2, decoder_last_pipeline_num_layers=1), "its | say where stages end; leave"),
        (given("*-|*-|*-|*-", 2), "--epp does not run interleaved pipelines; expected 2, one for"),
    ],
)
def test_patterns_that_cannot_be_are_one_line(wanted, says) -> None:
    with pytest.raises(ValueError) as refusal:
        require_pattern(wanted)
        refuse_segments(wanted)
    said = str(refusal.value)
    assert says in said and said.startswith("--hybrid-layer-pattern ") and "\n" not in said


@pytest.mark.parametrize(
    ("pattern", "program", "says"),
    [
        ("*-?", PROGRAM, "'?' stands for no layer"),
        ("M*-", PROGRAM, "--epp does not run Mamba layers (M in --hybrid-layer-pattern): use"),
        ("*-", None, "run megatron_epp.pretrain_hybrid with these flags"),
        (None, PROGRAM, "--hybrid-layer-pattern is missing: pretrain_hybrid trains"),
    ],
)
def test_they_end_with_status_2(corpus, pattern, program, says) -> None:
    how = {"epp": True, "pipeline_model_parallel_size": 1, "hybrid_layer_pattern": pattern}
    extra = {} if program is None else {"program": program}
    run = train(flags(corpus, **how), processes=1, **extra)
    assert run.status == 2, run.output
    (line,) = run.errors
    assert says in line


# ------------------------------------------------------------------ the model's shape


def shaped(pattern: str, **others) -> Namespace:
    args = Namespace(
        hybrid_layer_pattern=pattern,
        num_layers=len(pattern),
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        padded_vocab_size=1000,
        swiglu=True,
        untie_embeddings_and_output_weights=True,
        num_experts=None,
        moe_router_topk=2,
        moe_ffn_hidden_size=48,
        moe_shared_expert_intermediate_size=None,
        moe_layer_freq=1,
        window_size=None,
        window_attn_skip_freq=None,
        no_rope_freq=None,
        multi_latent_attention=False,
    )
    vars(args).update(others)
    return args


def test_each_letter_is_a_kind_of_its_own() -> None:
    made = model_shape(shaped("*-*E*-", num_experts=8))
    assert made.layer_kinds == ("attention", "mlp", "attention", "experts", "attention", "mlp")
    attention, mlp, experts = made.shapes.values()
    assert attention.carried_hidden == 64 and not attention.dense_hidden
    assert mlp.carried_hidden == 0 and mlp.flops_per_pair == 0 and mlp.norms == 1
    assert experts.expert_parameters == 8 * 3 * 64 * 48 and experts.query_hidden == 0
    windows = {"window_size": (16, 0), "window_attn_skip_freq": 3}
    made = model_shape(shaped("*-*-", **windows))  # layer 3 has none
    assert made.layer_kinds == ("window", "mlp", "attention", "mlp")
    assert model_shape(shaped("--")).layer_kinds == ("mlp", "mlp")
    assert [shape.attention for shape in layer_shapes(shaped("*-"))] == [True, False]


def test_a_profile_has_one_layer_of_every_letter_on_every_stage() -> None:
    layers, size = _layers(["--hidden-size", "8", "--hybrid-layer-pattern=*-*-|*-*E"], 2)
    assert (layers, size) == (8, ["--hybrid-layer-pattern=*-*-*-*E|*-*-*-*E"])
    assert _layers(["--num-layers", "4"], 2) == (4, ["--num-layers", "8"])
    pattern = size[0].partition("=")[2]
    args = shaped(pattern, num_layers=16, encoder_num_layers=16, num_experts=8)
    _one_of_each_kind(args, layers, 2)
    assert args.hybrid_layer_pattern == "*-E|*-E" and args.num_layers == 6
    assert model_shape(args).layer_kinds == ("attention", "mlp", "experts") * 2


def test_a_long_pattern_keeps_layers_of_every_letter() -> None:
    args = shaped("*-*-*-*-*E" * 2, num_experts=8)
    assert small_kinds(args, [10, 10], [6, 6])["hybrid_layer_pattern"] == "*-*-*E|*-*-*E"
    assert small_kinds(shaped("*-*-"), [2, 2], [2, 2])["hybrid_layer_pattern"] == "*-|*-"
