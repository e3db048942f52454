"""Megatron's own data and schedule against ``--epp``, feature by feature, without code of ours.

All documents are the same: 128 tokens in the corpus of Megatron, whose samples of 129 tokens then
are a document and its first token again in whatever order it shuffles them; in the corpus of
``--epp``, the documents are such samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pytest

from tests.mcore.models import TRAINED_MLA, TRAINED_MOE
from tests.mcore.resumes import STOCK, require_same_numbers
from tests.mcore.runs import (
    DOUBLE,
    PROGRAM,
    VOCABULARY,
    Run,
    exact_losses,
    flags,
    trained,
    write_documents,
)

ITERATIONS, BATCH = 4, 4
# Adam's usual epsilon makes rounding errors of gradients near zero as large as steps.
COMMON = {"global_batch_size": BATCH, "train_iters": ITERATIONS, "lr": "1e-2", "adam_eps": "1e-4"}
WHOLE, SLICED = ({"epp": True, "epp_planner": planner} for planner in ("packing", "seq1f1b"))
FLOAT64 = {"clip_grad": 0}  # Megatron's norm is of float32


@dataclass(frozen=True)
class Feature:
    """Flags of a model that has the feature, and what changes where it is switched off.

    Attributes:
        sliced: further flags where documents are cut.
        length: tokens of a document.
        within: relative error of losses in float64.
    """

    model: Mapping[str, object]
    off: Mapping[str, object]
    sliced: Mapping[str, object] = field(default_factory=dict)
    length: int = 128
    within: float = 1e-12


# Megatron multiplies gradients of router losses by coefficients in float32: these are exact there.
_ROUTED = {
    **TRAINED_MOE,
    "moe_aux_loss_coeff": 0.125,
    "moe_z_loss_coeff": 2**-7,
    "moe_router_bias_update_rate": 0.1,
}
_DECOUPLED = {"decoupled_lr": "3e-2", "decoupled_min_lr": "3e-2"}
_SCALED = {"use_rope_scaling": True, "rope_scaling_factor": 8}
FEATURES = {
    "router losses": Feature(_ROUTED, {"moe_aux_loss_coeff": 0, "moe_z_loss_coeff": None}),
    "tied embeddings": Feature(
        {"untie_embeddings_and_output_weights": None}, {"untie_embeddings_and_output_weights": True}
    ),
    "windows and sinks": Feature(
        {"window_size": "16,0", "window_attn_skip_freq": 2, "softmax_type": "learnable"},
        {"window_size": None, "window_attn_skip_freq": None},
    ),
    "sinks": Feature({"softmax_type": "learnable"}, {"softmax_type": None}),
    # The share of a depth's targets in the tokens is float32 in Megatron.
    "MTP": Feature({"mtp_num_layers": 2}, {"mtp_num_layers": None}, within=1e-8),
    "expert bias": Feature(_ROUTED, {"moe_router_bias_update_rate": 0}),
    "decoupled rate": Feature(_DECOUPLED, dict.fromkeys(_DECOUPLED)),
    "decoupled rate, vocabulary parallelism": Feature(
        _DECOUPLED, dict.fromkeys(_DECOUPLED), {"epp_vocab_parallel": "on"}
    ),
    "gates": Feature({"attention_output_gate": True}, {"attention_output_gate": None}),
    "no-rope layers": Feature({"no_rope_freq": 2}, {"no_rope_freq": None}),
    # Wavelengths above 2,048 positions are scaled: many, with this base. Wide weights attend more.
    "rope scaling": Feature(
        {**_SCALED, "rotary_base": 5000, "kv_channels": 64, "init_method_std": 0.2},
        dict.fromkeys(_SCALED),
        length=512,
    ),
    "MLA": Feature(TRAINED_MLA, dict.fromkeys(TRAINED_MLA)),
}
FIRST_TIER = ("router losses", "tied embeddings", "windows and sinks")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.everything] * (n not in FIRST_TIER)) for n in FEATURES],
)
def test_losses_are_those_of_megatrons_own_samples(name: str, tmp_path: Path) -> None:
    feature = FEATURES[name]
    document = numpy.random.RandomState(7).randint(0, VOCABULARY, feature.length)
    lengths = {"seq_length": feature.length, "max_position_embeddings": feature.length}
    stocks, ours = (
        write_documents(tmp_path / which, [each] * (ITERATIONS * BATCH + 2), dtype=numpy.uint16)
        for which, each in (("stock", document), ("ours", [*document, document[0]]))
    )

    def run(corpus: Path, program: tuple[str, ...], *how: Mapping[str, object]) -> Run:
        changes = {key: value for each in (feature.model, *how) for key, value in each.items()}
        return trained(flags(corpus, **{**COMMON, **lengths, **changes}), program=program)

    sliced = {**SLICED, **feature.sliced}
    stock = exact_losses(run(stocks, DOUBLE, STOCK, FLOAT64))
    assert len(stock) == ITERATIONS
    for way in (WHOLE, sliced):
        losses = exact_losses(run(ours, DOUBLE, way, FLOAT64))
        assert losses == pytest.approx(stock, rel=feature.within)
    without = exact_losses(run(ours, DOUBLE, WHOLE, FLOAT64, feature.off))
    assert max(abs(one - other) for one, other in zip(without, stock, strict=True)) > 1e-4

    single = run(stocks, PROGRAM, STOCK)
    for way in (WHOLE, sliced):
        require_same_numbers(run(ours, PROGRAM, way), single, ITERATIONS)
