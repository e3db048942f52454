"""The certificate's own parts: what it draws, how it scales a model down, how it judges."""

from argparse import Namespace
from collections import Counter
from dataclasses import replace

import numpy
import pytest

from megatron_epp.certify.batches import Frame, StepCoverage, draw
from megatron_epp.certify.command import BatchVerdict, header, row, verdict
from megatron_epp.certify.compare import Shard, assembled, worst_gradient
from megatron_epp.certify.degrees import Degrees
from megatron_epp.mcore.certify.scale_down import fewer, heads, small
from megatron_epp.mcore.model.shape import stage_layers
from megatron_epp.show.table import COLUMNS
from tests.mcore.models import megatron_args

FRAME = Frame(vocabulary=61, layers=(2, 1, 2), replicas=2, modes="kfcmnab")

# ------------------------------------------------------------------ what is drawn


def test_what_has_no_target_counts_by_hand() -> None:
    drawn = draw(7, 1, FRAME)
    assert drawn.untargeted.replicas == 0
    masks = [numpy.zeros_like(mask) for mask in drawn.loss_masks]
    masks[drawn.step.assignments[0][0]][0] = 1
    blank = replace(drawn, loss_masks=tuple(masks)).untargeted
    chunks = sum(len(plan.chunks) for plan in drawn.step.plans)
    assert (blank.chunks, blank.replicas) == (chunks - 1, FRAME.replicas - 1)


def test_coverage_counts_by_hand() -> None:
    drawn = draw(7, 1, FRAME)
    coverage = StepCoverage.of(drawn)
    spans = [chunk.spans for plan in drawn.step.plans for chunk in plan.chunks]
    assert coverage.chunks == len(spans) == coverage.packed + coverage.split + coverage.hybrid
    assert coverage.documents == len(drawn.lengths)
    pieces = Counter(
        (plan.replica, span.document)
        for plan in drawn.step.plans
        for chunk in plan.chunks
        for span in chunk.spans
    )
    assert coverage.cut == sum(count > 1 for count in pieces.values())
    assert coverage.layers == sum(FRAME.layers) * len(spans)


# ------------------------------------------------------------------ scaling down


def megatron(**changes: object) -> Namespace:
    sizes = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11008, "kv_channels": None}
    sizes |= {"num_attention_heads": 32, "num_query_groups": 8}
    return megatron_args(**sizes | changes)


@pytest.mark.parametrize(
    ("query", "key", "tp", "cp", "expected"),
    [
        (32, 8, 1, 1, (8, 2)),  # the ratio stays
        (32, 32, 1, 1, (4, 4)),
        (32, 32, 2, 1, (8, 8)),
        (64, 1, 1, 1, (8, 1)),  # the ratio is cut at 8
        (64, 1, 2, 1, (8, 1)),  # ranks share the one head
        (64, 8, 4, 1, (64, 8)),
        (28, 4, 4, 1, (28, 4)),
        (12, 4, 1, 1, (6, 2)),
        (32, 8, 1, 2, (8, 2)),
        (32, 8, 1, 4, (8, 2)),  # two ranks share a key head
        (32, 2, 1, 4, (16, 2)),
        (12, 12, 1, 3, (6, 6)),
        (6, 6, 2, 2, (6, 6)),  # three a rank: to be refused
    ],
)
def test_heads_keep_their_ratio(query, key, tp, cp, expected) -> None:
    assert heads(query, key, tp, cp) == expected


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="--num-attention-heads 30: no multiple of --num-query"):
        heads(30, 8, 1)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([8, 8, 8, 8], [2, 2, 2, 2]),
        ([1, 1], [1, 1]),
        ([7, 8, 8, 5], [2, 3, 3, 1]),
        ([0, 12, 12, 0], [0, 2, 2, 0]),
        ([1, 2, 3, 4, 5], [1, 2, 3, 3, 3]),
    ],
)
def test_stages_that_differ_stay_different(counts, expected) -> None:
    assert fewer(counts) == expected


@pytest.mark.parametrize(
    ("changes", "pp", "expected"),
    [
        ({}, 4, [8, 8, 8, 8]),
        ({"decoder_first_pipeline_num_layers": 5, "num_layers": 29}, 4, [5, 8, 8, 8]),
        ({"decoder_last_pipeline_num_layers": 4, "num_layers": 20}, 3, [8, 8, 4]),
        (
            {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 2,
             "num_layers": 5}, 2, [3, 2],
        ),
        (
            {"account_for_embedding_in_pipeline_split": True,
             "account_for_loss_in_pipeline_split": True, "num_layers": 30}, 4, [7, 8, 8, 7],
        ),
    ],
)  # fmt: skip
def test_layers_lie_where_megatron_puts_them(changes, pp, expected) -> None:
    assert stage_layers(megatron(**changes), pp, None) == expected


@pytest.mark.parametrize(
    ("changes", "pp", "layout", "says"),
    [
        ({"num_layers": 2}, 4, None, "--pp 4: more stages than the 2 layers"),
        ({"num_layers": 30}, 4, None, "--num-layers 30: does not divide over --pp 4"),
        ({"decoder_first_pipeline_num_layers": 6}, 4, None, "--num-layers 32: 26 layers are left"),
        ({}, 3, ["Et", "tL"], "--pipeline-model-parallel-layout: 2 stages where --pp is 3"),
    ],
)
def test_layers_that_do_not_fit(changes, pp, layout, says) -> None:
    with pytest.raises(ValueError, match=says):
        stage_layers(megatron(**changes), pp, layout)


def test_a_llama_of_a_few_thousand_weights() -> None:
    tiny = small(megatron(), Degrees(2, 2, 1), None)
    assert tiny.layers == (2, 2)
    values = tiny.values
    assert (values["num_attention_heads"], values["num_query_groups"]) == (16, 4)
    assert values["hidden_size"] == 16 * values["kv_channels"] == 128
    assert values["ffn_hidden_size"] / 128 == pytest.approx(11008 / 4096, rel=0.1)
    assert values["vocab_size"] == values["padded_vocab_size"] == 62  # the same for both ranks


def test_heads_wider_than_the_hidden_size_stay_wider() -> None:
    args = megatron(kv_channels=256, hidden_size=2048, num_attention_heads=16, num_query_groups=16)
    values = small(args, Degrees(1, 1, 1), None).values
    assert values["num_attention_heads"] * values["kv_channels"] == 2 * values["hidden_size"]


def test_a_layout_is_scaled_stage_by_stage() -> None:
    tiny = small(megatron(), Degrees(3, 1, 1), ["E" + "t" * 12, "t" * 20, "L"])
    assert tiny.values["pipeline_model_parallel_layout"] == "Et|tt|L"
    assert tiny.layers == (1, 2, 0)


def test_a_model_without_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match="--hidden-size is missing among the model flags"):
        small(megatron(hidden_size=None), Degrees(1, 1, 1), None)


# ------------------------------------------------------------------ judging

REFERENCE = {
    "decoder.layers.mlp.weight": numpy.array([[1.0, -4.0], [0.5, 0.25]]),  # two layers
    "embedding.weight": numpy.array([[2.0, 1.0], [8.0, 0.0]]),
}


def parts() -> list[Shard]:
    """Layers apart, the embedding in two halves, as two stages or ranks hold them."""
    layers, table = REFERENCE["decoder.layers.mlp.weight"], REFERENCE["embedding.weight"]
    return [
        Shard("decoder.layers.mlp.weight", (2, 2), (0, slice(0, 2)), layers[0].copy()),
        Shard("decoder.layers.mlp.weight", (2, 2), (1, slice(0, 2)), layers[1].copy()),
        Shard("embedding.weight", (2, 2), (slice(0, 1), slice(0, 2)), table[:1].copy()),
        Shard("embedding.weight", (2, 2), (slice(1, 2), slice(0, 2)), table[1:].copy()),
    ]


def test_equal_gradients_have_no_error() -> None:
    assert worst_gradient(parts(), REFERENCE).error == 0
    assert all(numpy.array_equal(a, REFERENCE[key]) for key, a in assembled(parts()).items())


def test_an_error_is_relative_to_the_largest_of_its_own_parameter() -> None:
    some = parts()
    some[1].values[1] += 1e-3  # layer 1, whose largest is 0.5
    worst = worst_gradient(some, REFERENCE)
    assert worst.error == pytest.approx(2e-3)
    assert worst.name == "decoder.layers.1.mlp.weight"
    some[2].values[0] += 0.8  # a part of the embedding, whose largest is 8 in another part
    worst = worst_gradient(some, REFERENCE)
    assert (worst.name, worst.error) == ("embedding.weight", pytest.approx(0.1))


def test_every_copy_is_judged() -> None:
    wrong = replace(parts()[3], values=parts()[3].values + 1)
    assert worst_gradient([*parts(), wrong], REFERENCE).error == pytest.approx(1 / 8)
    assert worst_gradient([wrong, *parts()], REFERENCE).error == pytest.approx(1 / 8)


@pytest.mark.parametrize("value", [numpy.nan, numpy.inf])
def test_a_gradient_that_is_no_number_is_infinitely_wrong(value) -> None:
    some = parts()
    some[0].values[0] = value
    assert worst_gradient(some, REFERENCE).error == numpy.inf


def test_a_gradient_that_nobody_computed_is_infinitely_wrong() -> None:
    worst = worst_gradient(parts()[:-1], REFERENCE)
    assert (worst.error, worst.name) == (numpy.inf, "embedding.weight (computed by no rank)")


def test_noise_around_zero_is_measured_by_the_largest_gradient() -> None:
    reference = {**REFERENCE, "bias": numpy.array([1e-17, -2e-17])}
    part = Shard("bias", (2,), (slice(0, 2),), numpy.array([-3e-17, 1e-17]))
    assert worst_gradient([*parts(), part], reference).error < 1e-16
    wrong = replace(part, values=numpy.array([1e-6, 0.0]))
    assert worst_gradient([*parts(), wrong], reference).error == pytest.approx(1e-6 / 8)


def test_in_fewer_digits_errors_are_told_in_the_plain_models_own() -> None:
    generator = numpy.random.default_rng(3)
    right = {key: generator.standard_normal((2, 200)) for key in "abc"}
    own, ours = (
        {key: x + 1e-2 * generator.standard_normal(x.shape) for key, x in right.items()}
        for _ in range(2)
    )

    def worst(values: dict, beside: dict) -> float:
        places = [(key, layer) for key in values for layer in range(2)]
        layers = [Shard(k, (2, 200), (n, slice(0, 200)), values[k][n]) for k, n in places]
        return worst_gradient(layers, right, beside).error

    assert worst(right, own) == 0
    assert worst(ours, own) == pytest.approx(1, rel=0.2)
    # Where the plain model had more luck than elsewhere, so need we not have.
    lucky = {**own, "a": right["a"]}
    assert worst(ours, lucky) == pytest.approx(1, rel=0.3)
    assert worst({**ours, "b": 1.05 * ours["b"]}, own) > 4
    assert worst({**ours, "b": numpy.nan * ours["b"]}, own) == numpy.inf
    # What is exactly zero in both formats is so in ours.
    right["a"][:] = own["a"][:] = ours["a"][:] = 0
    assert worst(ours, own) == pytest.approx(1, rel=0.2)
    ours["a"][0, 0] = 1e-30
    assert worst(ours, own) == numpy.inf


# ------------------------------------------------------------------ what is printed


def judged(**changes: object) -> BatchVerdict:
    coverage = StepCoverage.of(draw(7, 0, FRAME))
    fields = {"loss_error": 0.0, "gradient_error": 2e-15, "parameter": "w"}
    return BatchVerdict(0, coverage, **fields | changes)


def test_the_verdict_names_the_batches_that_failed() -> None:
    good, bad = judged(), replace(judged(gradient_error=3e-9), number=4)
    assert verdict([good]).splitlines()[-1].startswith("certified: 1 batches, worst error 2.0e-15")
    last = verdict([good, bad]).splitlines()[-1]
    assert last == (
        "not certified: 1 of 2 batches differ from the reference model: 4; "
        "worst error 3.0e-09 (bound 1e-12)"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_error": 1.1e-12},
        {"loss_error": 1.1e-12},
        {"gradient_error": float("nan")},
        {"problems": ("rank 0: a collective not on the list",)},
    ],
)
def test_what_does_not_pass(changes) -> None:
    assert judged().passed
    assert not judged(**changes).passed


def test_a_problem_stands_below_its_row() -> None:
    first, second = row(judged(problems=("stage 1: late",))).splitlines()
    assert first == row(judged()) and second.strip() == "stage 1: late"


def test_a_row_that_fails_names_the_worst_gradient() -> None:
    first, second = row(judged(gradient_error=3e-9)).splitlines()
    assert first.split()[-1] == "3.0e-09" and second.strip() == "worst gradient: w"
    assert len(header(judged())) == len(row(judged())) <= COLUMNS
