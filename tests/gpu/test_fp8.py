"""fp8: weights quantised once an iteration and no less often, or held so; what slices add up to."""

import copy
from dataclasses import replace
from unittest.mock import patch

import pytest

from megatron_epp.mcore.patching import emulated_engine
from tests.gpu.test_first_iteration import SLICES, off, plan, run
from tests.gpu.test_split import halves

pytestmark = pytest.mark.gpu

LINEARS = 2 * 4  # of two layers
certified = pytest.mark.skipif(
    emulated_engine.is_wanted(), reason="certified with emulated kernels (tests/engine)"
)


@pytest.fixture
def quantised(alone, engine, request):
    """In blocks, where a test does not say otherwise."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    from megatron_epp.mcore.data.row_shard import RowShard

    available, why = FP8GlobalStateManager.is_fp8_block_scaling_available()
    if not available:
        pytest.skip(why)
    args = copy.copy(alone.args)
    args.fp8, args.fp8_recipe = "hybrid", getattr(request, "param", "blockwise")
    return replace(alone, args=args, share=RowShard.of(args))


def stages(world, count: int):
    """Stages with the same weights."""
    import torch

    from scripts.bench.single_stage import build_stage

    made = [build_stage(world, 2, False, False) for _ in range(count)]
    with torch.no_grad():
        for other in made[1:]:
            for mine, first in zip(other.parameters(), made[0].parameters(), strict=True):
                mine.copy_(first)
    return made


def test_weights_are_quantised_once_an_iteration(quantised) -> None:
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    (model,) = stages(quantised, 1)
    plain, weights = Float8BlockQuantizer.quantize_impl, []

    def noting(self, tensor):
        if self.block_scaling_dim == 2:
            weights.append(tensor.shape)
        return plain(self, tensor)

    with patch.object(Float8BlockQuantizer, "quantize_impl", noting):
        for iteration in (1, 2):
            run(quantised, model)
            assert len(weights) == iteration * LINEARS  # of SLICES chunks


@certified
def test_changed_weights_are_seen_by_the_next_iteration(quantised) -> None:
    """The guard can fail: where what was quantised is kept, the old ones train on."""
    import torch

    from megatron_epp.mcore.trainer import stage_runner

    kept, right, wrong = stages(quantised, 3)
    run(quantised, right)
    run(quantised, wrong)
    with torch.no_grad():
        for model in (kept, right, wrong):
            for weight in model.parameters():
                weight.mul_(torch.linspace(0.5, 2.0, weight.shape[-1]).to(weight))
    expected = run(quantised, kept)
    assert off(run(quantised, right), expected) < 1e-3
    with patch.object(stage_runner, "forget_quantised_weights", lambda model: None):
        assert off(run(quantised, wrong), expected) > 0.1


@certified
@pytest.mark.parametrize("quantised", ["blockwise", "tensorwise"], indirect=True)
def test_weights_held_in_fp8_are_multiplied_by_as_they_are(quantised) -> None:
    """They give what weights quantised in an iteration give, behind a step, too, which is not
    before they are written; no copy lies beside them."""
    import torch
    from megatron.core.fp8_utils import is_float8tensor

    from megatron_epp.mcore.model.quantisation import COPY_BYTES

    args = copy.copy(quantised.args)
    args.fp8_param_gather = args.use_distributed_optimizer = True
    held = replace(quantised, args=args)
    (plain,), (model,) = stages(quantised, 1), stages(held, 1)
    weights = [one for one in model.parameters() if is_float8tensor(one)]
    assert len(weights) == LINEARS
    for factor in (1.0, 1.7):
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                mine.copy_(theirs.mul_(factor))
        expected = run(quantised, plain)
        assert off(run(held, model), expected) < 1e-3
        assert off(run(held, model, halves((2, 0, 3, 1))), expected) < 1e-2
    assert not any(getattr(module, "_fp8_workspaces", None) for module in model.modules())
    for weight in weights:
        inner = [one for one in weight.get_metadata().values() if isinstance(one, torch.Tensor)]
        per_number = sum(one.numel() * one.itemsize for one in inner) / weight.numel()
        assert per_number <= 1.01 * COPY_BYTES[args.fp8_recipe]


@certified
def test_slices_recomputed_and_halves_compute_what_they_do_in_fp8(quantised, alone) -> None:
    """What backward computes again is quantised, too, and weights' gradients of quantised operands
    can wait."""
    import torch

    whole, split, again = stages(quantised, 3)
    recomputed = plan(letters=("ff",) * SLICES)
    expected = run(quantised, whole)
    assert off(run(quantised, again, recomputed), expected) < 1e-3
    assert off(run(quantised, split, halves((2, 0, 3, 1))), expected) < 1e-2
    plain = stages(alone, 1)[0]
    with torch.no_grad():
        for mine, theirs in zip(plain.parameters(), whole.parameters(), strict=True):
            mine.copy_(theirs)
    assert 5e-3 < off(run(alone, plain), expected) < 0.3  # the guard can fail: there is fp8


def test_calibration_weighs_what_is_saved_in_fp8(quantised, alone) -> None:
    """A linear's input is saved in one byte a number, by columns, where bf16 has two."""
    from megatron_epp.mcore.calibrate.probe import Shape
    from scripts.bench.single_stage import build_stage, probe_alone

    grows = []
    for world in (alone, quantised):
        probe = probe_alone(world, build_stage(world, 1, False, False))
        probe.layers(Shape(1024), "k")  # weights are quantised in the first
        held = [probe.layers(Shape(size), "k", weigh=True).held_bytes for size in (1024, 2048)]
        grows.append(held[1] - held[0])
    in_bf16, in_fp8 = grows
    assert 0.5 * in_bf16 < in_fp8 < 0.9 * in_bf16
