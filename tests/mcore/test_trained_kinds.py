"""Every kind of layer, trained: resumed bit for bit, with Megatron's own numbers, repeated."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.mcore.models import TRAINED_EXPERTS, TRAINED_MLA, TRAINED_MOE, TRAINED_SSM
from tests.mcore.resumes import (
    LENGTHS,
    Six,
    after_three,
    logged,
    require_megatrons_own_numbers,
    require_three_more_alike,
    six_of,
    tensors,
    to_megatron_and_back,
)
from tests.mcore.runs import PROGRAM, flags, trained

everything = pytest.mark.everything
HYBRID_PROGRAM = ("-m", "megatron_epp.pretrain_hybrid")
LOSSES = dict.fromkeys(("seq_load_balancing_loss", "z_loss"), 1e-5)


@dataclass(frozen=True)
class Trained:
    """A model and its program.

    alone: what changes on one stage; losses: figures of Megatron's log, and how far they may be
    off; saved: ends of names in its checkpoint, those of Transformer Engine's layers
    """

    model: Mapping[str, object]
    program: tuple[str, ...] = PROGRAM
    alone: Mapping[str, object] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    lengths: tuple[int, ...] = tuple(LENGTHS)
    saved: tuple[str, ...] = ()


KINDS = {
    # A layer of every kind, and a further token predicted.
    "hybrid": Trained(
        {**TRAINED_SSM, **TRAINED_MOE, "hybrid_layer_pattern": "*-EM|GE/*-"},
        HYBRID_PROGRAM,
        {"hybrid_layer_pattern": "*-E*--"},
        LOSSES,
        saved=(
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
            "decoder.layers.2.pre_mlp_layernorm.weight",
            "decoder.layers.3.mixer.in_proj.layer_norm_weight",
            "decoder.layers.4.self_attention.in_proj.layer_norm_weight",
            "decoder.final_norm.weight",
        ),
    ),
    "MLA": Trained(
        {**TRAINED_MLA, "epp_mla_keeps": "latents"},
        alone={"epp_mla_keeps": "auto"},
        lengths=(400, 30, 20, 90, 12, 60, 300, 8, 40, 33, 120, 77) * 4,
        saved=("linear_kv_up_proj.layer_norm_weight",),
    ),
    "experts, windows and sinks": Trained(TRAINED_EXPERTS, losses=LOSSES),
    "SSM": Trained(TRAINED_SSM, HYBRID_PROGRAM),
    # Terms of unit size cancel to the indexer's loss: scores begin nearly alike, in float32.
    "DSA": Trained(
        {
            **TRAINED_MLA,
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": 8,
            "dsa_indexer_head_dim": 8,
            "dsa_indexer_topk": 16,
            "dsa_indexer_loss_coeff": 0.1,
            "no_dsa_indexer_rotate_activation": True,
        },
        losses={"indexer loss": 1e-3},
    ),
}


def named(*names: str) -> list:
    """Names of KINDS as parameters; the hybrid is in the first tier."""
    return [pytest.param(name, marks=[everything] * (name != "hybrid")) for name in names]


@pytest.fixture(scope="module")
def six(request, tmp_path_factory) -> Six:
    kind = KINDS[request.param]
    return six_of(tmp_path_factory.mktemp("six"), kind.model, kind.program, list(kind.lengths))


@pytest.mark.parametrize(
    ("six", "name"),
    [
        pytest.param(name, name, marks=[everything] * (name != "hybrid"))
        for name in ("hybrid", "MLA", "experts, windows and sinks")
    ],
    indirect=["six"],
)
def test_three_and_three_are_six_bit_for_bit(six, name: str, tmp_path) -> None:
    saved = require_three_more_alike(six, tmp_path)
    weights = [tensor for tensor in saved if "exp_avg" not in tensor]
    for end in KINDS[name].saved:
        assert any(weight.endswith(end) for weight in weights), (end, sorted(weights))
    if name.startswith("experts"):
        assert any("experts" in tensor and "exp_avg" in tensor for tensor in saved)
        # After three iterations: a bias that goes to and fro is back where it was after six.
        third = tensors(six.folder / "iter_0000003", tmp_path / "third.pt")
        biases = [tensor for tensor in third if tensor.endswith(("expert_bias", "softmax_offset"))]
        assert len(biases) >= 2 and not [bias for bias in biases if not third[bias].any()]


@pytest.mark.parametrize("six", named("hybrid", "experts, windows and sinks"), indirect=True)
def test_checkpoints_load_both_ways(six, tmp_path) -> None:
    to_megatron_and_back(six.job, after_three(six.folder, tmp_path))


@pytest.mark.parametrize("name", named(*KINDS))
def test_equal_documents_give_megatrons_own_numbers(name: str, tmp_path) -> None:
    """Losses that layers add, too; with Megatron's own attention, projections and indexer."""
    kind = KINDS[name]
    model = {**kind.model, "pipeline_model_parallel_size": 1, **kind.alone}
    require_megatrons_own_numbers(tmp_path, model, kind.program, others=kind.losses)


@everything
@pytest.mark.slow
@pytest.mark.parametrize("six", ["experts, windows and sinks"], indirect=True)
def test_a_cost_model_is_measured_with_experts(six) -> None:
    """The calibration runs routers and leaves nothing in them; it knows no borders of slices."""
    run = six.job.train(epp=True, epp_cost_model=None, train_iters=1)
    assert run.losses == pytest.approx(six.run.losses[:1], rel=1e-5)
    (ours,), (theirs, *_) = (logged("z_loss", one.output) for one in (run, six.run))
    assert ours == pytest.approx(theirs, rel=1e-5)


@everything
def test_an_iteration_that_is_repeated_moves_the_bias_once(corpus, tmp_path) -> None:
    """One rank finds no memory in iteration 2, once: losses and biases are those of a run in which
    nothing failed."""
    shared = {
        **TRAINED_EXPERTS,
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
