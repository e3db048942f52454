"""Backwards in two halves through Transformer Engine's linears: the gradients of whole ones."""

import copy
from dataclasses import replace
from unittest.mock import patch

import pytest

from tests.gpu.test_first_iteration import off, plan, run

pytestmark = pytest.mark.gpu

# Of chunks, whose Is run from the last to the first.
ORDERS = {"as Is": (3, 2, 1, 0), "the other way": (0, 1, 2, 3), "mixed": (2, 0, 3, 1)}


def halves(weights):
    """The last two chunks are recomputed."""
    return plan(letters=("kk", "kk", "ff", "bb"), weights=weights)


@pytest.fixture(
    scope="module",
    params=[(biased, fused) for biased in (False, True) for fused in (False, True)],
    ids=["", "fused", "biased", "biased, fused"],
)
def whole(alone, engine, request):
    """(world, model, its gradients) with whole backwards."""
    from scripts.bench.single_stage import build_stage

    args = copy.copy(alone.args)
    args.add_bias_linear, args.gradient_accumulation_fusion = request.param
    args.add_qkv_bias = args.add_bias_linear
    world = replace(alone, args=args)
    model = build_stage(world, 2, False, False)
    return world, model, run(world, model)


@pytest.mark.parametrize("weights", ORDERS)
def test_halves_add_up_to_the_whole_from_the_first_iteration_on(whole, weights) -> None:
    import torch

    from megatron_epp.mcore.model.split_backward import Deferral, kept_in_input
    from scripts.bench.single_stage import build_stage

    world, model, expected = whole
    split = build_stage(world, 2, False, False)
    with torch.no_grad():
        for mine, theirs in zip(split.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    assert kept_in_input(split) == []
    assert len(Deferral(split).engines) == 8  # else W would have nothing to do
    for _ in range(2):
        assert off(run(world, split, halves(ORDERS[weights])), expected) < 1e-2


def test_what_i_leaves_is_what_w_adds(alone, engine) -> None:
    """The guard can fail: without its Ws the weights of linears have no gradient at all."""
    from megatron_epp.layers.wgrad.linear import DeferredWeightGrads
    from megatron_epp.mcore.calibrate.probe import Shape
    from megatron_epp.mcore.model.split_backward import Deferral
    from scripts.bench.single_stage import build_stage, probe_alone

    model = build_stage(alone, 1, False, False)
    probe = probe_alone(alone, model)
    with patch.object(DeferredWeightGrads, "accumulate_all", lambda self: None):
        model.zero_grad_buffer()
        probe.layers(Shape(256), "k", split=True)
    weights = [module.weight for module in Deferral(model).engines]
    assert len(weights) == 4
    assert all(float(weight.main_grad.norm()) == 0 for weight in weights)
    probe.layers(Shape(256), "k", split=True)
    assert all(float(weight.main_grad.norm()) > 0 for weight in weights)


def test_work_before_timed_ops_defers_nothing(alone, engine) -> None:
    """Its layers run whole, while the timed ones are split and while ends run without layers."""
    from megatron_epp.layers.wgrad.linear import DeferredWeightGrads
    from megatron_epp.mcore.calibrate.clocks import NoClock
    from megatron_epp.mcore.calibrate.probe import Shape
    from megatron_epp.mcore.model.split_backward import Deferral
    from scripts.bench.single_stage import build_stage, probe_alone

    class Working(NoClock):
        def __init__(self, work):
            self.work = work

        def start(self, rested=True):
            self.work()

    model = build_stage(alone, 1, True, True)
    probe = probe_alone(alone, model)
    untimed = probe.timed_by(NoClock())
    working = probe.timed_by(Working(lambda: untimed.layers(Shape(128), "k")))
    weights = [
        module.weight
        for module in Deferral(model).engines
        if module is not probe.model.output_layer
    ]
    assert len(weights) >= 4
    for timed in (
        lambda: working.layers(Shape(256), "k", split=True),
        lambda: working.ends(Shape(256)),
    ):
        model.zero_grad_buffer()
        with patch.object(DeferredWeightGrads, "accumulate_all", lambda self: None):
            timed()
        assert all(float(weight.main_grad.norm()) > 0 for weight in weights)


def test_a_backward_follows_its_forward_and_only_a_w_that_is_there_is_timed(alone, engine) -> None:
    """A device that has not rested need not work for long; the work before nothing is left out."""
    from megatron_epp.mcore.calibrate.clocks import NoClock
    from megatron_epp.mcore.calibrate.probe import Shape
    from scripts.bench.single_stage import build_stage, probe_alone

    starts = []

    class Counting(NoClock):
        def start(self, rested=True):
            starts.append(rested)

    probe = probe_alone(alone, build_stage(alone, 1, False, False)).timed_by(Counting())
    probe.layers(Shape(64), "k")
    assert starts == [True, False]
    starts.clear()
    probe.layers(Shape(64), "k", split=True)
    assert starts == [True, False, False]
