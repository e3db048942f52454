"""Gradients of sliced, packed and hybrid chunks in bf16: at most twice the plain model's error."""

import pytest

pytestmark = pytest.mark.gpu

DOCUMENTS = (1500, 200, 300, 700)
WHOLE = ("0[0:1500]", "1[0:200]", "2[0:300]", "3[0:700]")
PLANS = {
    "sliced": (("0[0:700]", "0[700:701]", "0[701:1500]", *WHOLE[1:]), "kkkkkk"),
    "packed": (("0[0:1500]", "1[0:200] 2[0:300] 3[0:700]"), "kk"),
    "hybrid": (
        ("0[0:600]", "3[0:700] 0[600:1100]", "1[0:200] 0[1100:1500] 2[0:300]"),
        "kkk",
    ),
    "hybrid, recomputed": (
        ("0[0:600]", "3[0:700] 0[600:1100]", "1[0:200] 0[1100:1500] 2[0:300]"),
        "fcb",
    ),
    "sliced, recomputed": (("0[0:700]", "0[700:701]", "0[701:1500]", *WHOLE[1:]), "fmnacf"),
}
# Transformer Engine keeps a norm's weight in the linear behind it.
NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def plan_of(chunks, letters):
    from megatron_epp.ir import Chunk, Kind, Op, Plan

    count = range(len(chunks))
    return Plan(
        documents=DOCUMENTS,
        layers=(2,),
        chunks=tuple(Chunk.parse(chunk.split()) for chunk in chunks),
        recompute=(tuple(letter * 2 for letter in letters),),
        orders=(
            (
                *(Op(Kind.FORWARD, c) for c in count),
                *(Op(Kind.BACKWARD, c) for c in reversed(count)),
            ),
        ),
    )


def parameters(model) -> dict:
    from megatron.core.utils import unwrap_model

    found = {}
    for name, parameter in unwrap_model(model).named_parameters():
        for engine, local in NAMES.items():
            name = name.replace(engine, local)
        found[name] = parameter
    return found


def gradients(world, model, plan) -> dict:
    from scripts.bench.single_stage import run_stage

    run_stage(world, model, plan, 0)
    return {name: p.main_grad.double().clone() for name, p in parameters(model).items()}


@pytest.fixture(scope="module")
def models(alone, plainly):
    """(world, model) in float32 with plain attention; in bf16 likewise; as training has it."""
    import torch

    from scripts.bench.single_stage import build_stage

    worlds = [plainly(torch.float32), plainly(torch.bfloat16), alone]
    made = [(world, build_stage(world, 2, True, True)) for world in worlds]
    with torch.no_grad():
        first = parameters(made[-1][1])
        for _, model in made:
            mine = parameters(model)
            assert mine.keys() == first.keys()
            for name, parameter in mine.items():
                parameter.copy_(first[name])
    return made


@pytest.fixture(scope="module")
def references(models):
    """(right, plain): of whole documents, each a chunk of its own."""
    (exact, plain, _) = models
    plan = plan_of(WHOLE, "kkkk")
    return gradients(*exact, plan), gradients(*plain, plan)


@pytest.mark.parametrize("kind", PLANS)
def test_error_is_at_most_twice_the_plain_models(kind, models, references) -> None:
    right, plain = references
    ours = gradients(*models[-1], plan_of(*PLANS[kind]))
    for name, expected in right.items():
        allowed = 2 * (plain[name] - expected).norm()
        error = (ours[name] - expected).norm()
        assert error <= allowed, f"{name}: {error / expected.norm():.2g} off"
        assert expected.norm() > 0
