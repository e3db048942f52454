"""Experts as one product in Megatron's layers: where Megatron's path is kept, and said so."""

import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

pytestmark = pytest.mark.gpu


def built(alone: Any, **changes: object) -> Any:
    """A stage of MoE layers, wrapped, whose experts are not yet one product."""
    from megatron_epp.mcore.kinds.moe import module
    from scripts.bench.single_stage import build_stage

    args = copy.copy(alone.args)
    vars(args).update(MOE | changes)
    with patch.object(module, "stack_experts"):
        return build_stage(replace(alone, args=args), 2, False, False)


MOE = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "expert_tensor_parallel_size": 1,
}


class OfTwo:
    """A group of two ranks; this is rank 0."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def lines_and_stacks(model: Any, of_other: list[str] | None = None) -> tuple[list[str], int]:
    """The logged lines, and the number of stacks; ``of_other``: another rank's reasons."""
    import torch.distributed as dist

    from megatron_epp.layers.moe.weight_stack import stacks_of
    from megatron_epp.mcore.kinds.moe import stacked

    def gather(every: list[Any], own: Any, group: Any) -> None:
        every[:] = [own, of_other]

    with (
        patch.object(dist, "all_gather_object", gather),
        patch.object(stacked.logger, "info") as info,
    ):
        stacked.stack_experts([model], None if of_other is None else OfTwo())
    lines = [call.args[0] % call.args[1:] for call in info.call_args_list]
    return lines, len(stacks_of(model))


def test_both_linears_of_every_layer_are_stacks(alone, engine) -> None:
    import torch

    from megatron_epp.layers.moe.weight_stack import stacks_of

    model = built(alone)
    assert lines_and_stacks(model, []) == ([], 4)
    for stack in stacks_of(model):
        assert stack.gradients_ENK.dtype == stack.weights[0].main_grad.dtype
        assert all(
            torch.equal(matrix, weight)
            for matrix, weight in zip(stack.weights_ENK, reversed(stack.weights), strict=True)
        )


def test_no_rank_stacks_alone(alone, engine) -> None:
    """Else it would sort rows in another order than the rank that receives them."""
    said = "experts: a product for each, because of frozen experts"
    assert lines_and_stacks(built(alone), ["frozen experts"]) == ([said], 0)


def freeze(model: Any) -> None:
    model.module.module.decoder.layers[1].mlp.experts.linear_fc2.weight3.requires_grad = False


def leave_a_gap(model: Any) -> None:
    weight = model.module.module.decoder.layers[0].mlp.experts.linear_fc1.weight1
    weight.main_grad = weight.main_grad.clone()


def leave_one(model: Any) -> None:
    model.module.module.decoder.layers[0].mlp.experts.num_local_experts = 1


def wrap_a_linear(model: Any) -> None:
    experts = model.module.module.decoder.layers[0].mlp.experts
    experts.linear_fc1.__class__ = type("Adapted", (type(experts.linear_fc1),), {})


@pytest.mark.parametrize(
    ("reason", "change", "flags"),
    [
        ("frozen experts", freeze, {}),
        ("gaps between the gradients of experts in their buffer", leave_a_gap, {}),
        ("adapters or quantised linears", wrap_a_linear, {}),
        ("biases of experts", None, {"add_bias_linear": True, "bias_dropout_fusion": False}),
        ("a single expert on a rank", leave_one, {}),
        ("weights of (512, 36), not in multiples of 16 bytes", None, {"moe_ffn_hidden_size": 36}),
    ],
)
def test_what_cannot_be_one_product_is_said(alone, engine, reason, change, flags) -> None:
    model = built(alone, **flags)
    if change is not None:
        change(model)
    lines, stacks = lines_and_stacks(model)
    assert (lines, stacks) == ([f"experts: a product for each, because of {reason}"], 0)


def test_local_experts_are_no_grouped_ones_and_nothing_is_said(alone, engine) -> None:
    assert lines_and_stacks(built(alone, moe_grouped_gemm=False)) == ([], 0)
