"""Every kind of layer, trained: resumed bit for bit, with Megatron's own numbers, repeated."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from tests.mcore.models import TRAINED_EXPERTS, TRAINED_MLA, TRAINED_MOE, TRAINED_SSM
from tests.mcore.resumes import (
    LENGTHS,
    Six,
    after_three,
    require_megatrons_own_numbers,
    require_three_more_alike,
    six_of,
    tensors,
    to_megatron_and_back,
)
from tests.mcore.runs import PROGRAM

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
        TRAINED_MLA,
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
