"""Which variants of Triton's permutations are compiled before the first iteration.

On CPUs Megatron's own permutation stands in for them.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from megatron_epp.mcore.kinds.moe import permutation as module
from megatron_epp.mcore.kinds.moe.permutation import compile_permutations

EXPERTS, HIDDEN, LOCAL = 12, 32, 6


@pytest.fixture
def compiled(monkeypatch) -> dict[str, set]:
    """By kernel, the variants that were compiled, as Triton tells them apart."""
    seen: dict[str, set] = {"map": set(), "forward": set(), "backward": set()}

    def permute(tokens, routing, probs, num_out_tokens, fused):
        assert fused and tokens.dtype == torch.bfloat16 and probs.dtype == torch.float32
        (rows, channels), count = tokens.shape, routing.shape[1]
        assert int(routing.sum()) == num_out_tokens
        seen["map"].add(of_map(rows, count))
        key = (*alike(rows, num_out_tokens), channels)
        seen["forward"].add(key)
        if tokens.requires_grad:
            tokens.register_hook(lambda gradient: seen["backward"].add(key))
        return moe_utils.permute(tokens, routing, probs=probs, num_out_tokens=num_out_tokens)

    def unpermute(tokens, order, shape, routing_map, fused):
        assert fused
        return moe_utils.unpermute(tokens, order, shape, routing_map=routing_map)

    monkeypatch.setattr(module, "permute", permute)
    monkeypatch.setattr(module, "unpermute", unpermute)
    return seen


def of_map(rows: int, count: int) -> tuple:
    return rows % 16 == 0, (count * -(-rows // 1024) - 1).bit_length()


def alike(rows: int, routed: int) -> tuple[bool, bool]:
    return rows % 16 == 0, routed % 16 == 0


def experts(topk: int, flex: bool = False, fusion: bool = True) -> SimpleNamespace:
    config = SimpleNamespace(
        moe_permute_fusion=fusion, num_moe_experts=EXPERTS, moe_router_topk=topk,
        moe_latent_size=None, hidden_size=HIDDEN, params_dtype=torch.bfloat16,
    )  # fmt: skip
    dispatcher = SimpleNamespace(_comm_manager=None) if flex else SimpleNamespace()
    return SimpleNamespace(
        config=config, token_dispatcher=dispatcher, local_expert_indices=[*range(LOCAL)]
    )


@pytest.mark.parametrize("topk", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("flex", [False, True])
def test_chunks_of_any_size_find_their_variants(compiled, topk, flex) -> None:
    compile_permutations(experts(topk, flex), torch.device("cpu"))
    count = LOCAL if flex else EXPERTS
    sizes = [*range(2, 4096), *range(4096, 32769, 7), 32768]
    routed = min(topk, count)
    assert {of_map(rows, count) for rows in sizes} <= compiled["map"]
    wanted = {(*alike(rows, rows * routed), HIDDEN) for rows in sizes}
    assert wanted <= compiled["forward"] and wanted <= compiled["backward"]


def test_without_the_flag_nothing_is_compiled(compiled) -> None:
    compile_permutations(experts(2, fusion=False), torch.device("cpu"))
    assert not any(compiled.values())
