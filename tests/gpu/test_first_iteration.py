"""Transformer Engine's linears with fused gradient accumulation: iteration 1 loses nothing."""

import copy
from dataclasses import replace
from unittest.mock import patch

import pytest

pytestmark = pytest.mark.gpu

LENGTH, SLICES = 1024, 4


def plan(
    boundaries=tuple(range(0, LENGTH + 1, LENGTH // SLICES)), letters=("kk",) * SLICES, weights=None
):
    """A document in slices; on the stage in the middle ``letters`` of each. ``weights``: chunks
    whose Ws run at the end in turn, with every B as an I; None for whole backwards."""
    from megatron_epp.ir import Chunk, Kind, Op, Plan, Span, check

    count = range(SLICES)
    forwards = tuple(Op(Kind.FORWARD, c) for c in count)
    whole, halves = (
        (*forwards, *(Op(kind, c) for c in reversed(count))) for kind in (Kind.BACKWARD, Kind.INPUT)
    )
    halves += tuple(Op(Kind.WEIGHT, c) for c in weights or ())
    made = Plan(
        documents=(boundaries[-1],),
        layers=(1, 2, 1),
        chunks=tuple(Chunk((Span(0, *boundaries[c : c + 2]),)) for c in count),
        recompute=(("k",) * SLICES, tuple(letters), ("k",) * SLICES),
        orders=(whole, whole if weights is None else halves, whole),
    )
    check(made)
    return made


def run(world, model, its_plan=None) -> dict:
    """The gradients of a stage in the middle; what neighbours send is the same every time."""
    import torch

    from scripts.bench.single_stage import run_stage

    torch.manual_seed(7)
    run_stage(world, model, plan() if its_plan is None else its_plan, 1)
    return {name: p.main_grad.clone() for name, p in model.named_parameters()}


def off(found, expected) -> float:
    return max(
        float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected
    )


def test_the_first_iteration_adds_up_what_every_other_does(alone, engine) -> None:
    from scripts.bench.single_stage import build_stage

    args = copy.copy(alone.args)
    args.gradient_accumulation_fusion = True
    world = replace(alone, args=args)
    model = build_stage(world, 2, False, False)
    first, second = run(world, model), run(world, model)
    assert off(first, second) < 1e-3  # kernels add in any order
    # The guard can fail: linears that overwrite in the backward of their first forward.
    for module in model.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = True
            module.disable_parameter_transpose_cache = False
    assert off(run(world, model), second) > 0.1


def test_no_forward_is_taken_for_an_iterations_first(alone, engine) -> None:
    """Weights in fp8 would be made of the parameters in that one, and in no later iteration."""
    from transformer_engine.pytorch import LayerNormLinear, Linear

    from scripts.bench.single_stage import build_stage

    model, seen = build_stage(alone, 1, False, False), []

    def noting(plain):
        def forward(self, x, *args, is_first_microbatch=None, **others):
            seen.append(is_first_microbatch)
            return plain(self, x, *args, is_first_microbatch=is_first_microbatch, **others)

        return forward

    with (
        patch.object(Linear, "forward", noting(Linear.forward)),
        patch.object(LayerNormLinear, "forward", noting(LayerNormLinear.forward)),
    ):
        run(alone, model)
        run(alone, model)
    assert len(seen) == 2 * SLICES * 4 and set(seen) == {None}


def test_norms_have_rows_that_their_fast_kernels_take(alone, engine) -> None:
    """Of chunks of any size, on the stage with the LM head, too."""
    import transformer_engine.pytorch.module.layernorm_linear as fused
    import transformer_engine.pytorch.ops.basic.rmsnorm as alone_norm

    from scripts.bench.single_stage import build_stage, run_stage

    rows, apply = [], fused.apply_normalization

    def counted(x, *others, **named):
        rows.append(x.numel() // x.shape[-1])
        return apply(x, *others, **named)

    def forwarded(norm, context, x, *others, **named):
        rows.append(x.numel() // x.shape[-1])
        return op_forward(norm, context, x, *others, **named)

    op_forward = alone_norm.RMSNorm.op_forward
    model = build_stage(alone, 1, False, True)
    odd = plan((0, 257, 300, 701, 1001))
    with (
        patch.object(fused, "apply_normalization", counted),
        patch.object(alone_norm.RMSNorm, "op_forward", forwarded),
    ):
        run_stage(alone, model, odd, 2)
        assert len(rows) >= 3 * SLICES and {count % 16 for count in rows} == {0}
        rows.clear()
        run_stage(replace(alone, share=replace(alone.share, block=1)), model, odd, 2)
        assert {count % 16 for count in rows} != {0}  # the guard can fail


def test_a_kernel_that_does_not_run_is_said_before_training(alone, engine) -> None:
    """By every rank; and what runs leaves no trace."""
    import torch

    from megatron_epp.mcore.calibrate.first_run import run_every_kind
    from megatron_epp.mcore.job.process_groups import make_groups
    from scripts.bench.single_stage import build_stage

    model, groups = build_stage(alone, 2, True, True), make_groups(alone.device)
    ran, first = [], model.module.module.decoder.layers[0]
    before = torch.random.get_rng_state()
    handle = first.register_forward_hook(lambda *_: ran.append(first))
    run_every_kind(alone.args, [model], groups, alone.share)
    assert len(ran) == 2  # documents, and a slice behind its context
    assert not any(p.main_grad.any() or p.grad is not None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), before)
    handle.remove()

    def fails(*_: object) -> None:
        raise RuntimeError("Triton < 9 is wrong on this device\nand more")

    first.register_forward_hook(fails)
    line = r"layers of attention and MLP cannot run: Triton < 9 is wrong on this device; expected"
    with pytest.raises(ValueError, match=line):
        run_every_kind(alone.args, [model], groups, alone.share)
