"""Losses of routers by document; their numbers in slices, packs and prefixes: certificates with
experts, and faults of them (tests/mcore/test_faults.py)."""

import torch
from torch import Tensor

from megatron_epp.ir import Span
from megatron_epp.layers.chunk_state import ChunkState, Rows
from megatron_epp.layers.moe.router_stats import Balancing, Pools, RouterStats
from megatron_epp.runtime.kv_store import Store

EXPERTS, TOPK, TOKENS = 6, 2, 4
WHOLE = Span(0, 0, TOKENS)
CHUNK = ChunkState(0, (Rows(0, TOKENS, WHOLE, False, True),), TOKENS, "k", Store({}))


def scored(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.softmax(logits, -1)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter(1, scores.topk(TOPK, 1).indices, True), scores


def passed(router_stats: RouterStats, logits: Tensor) -> Tensor:
    first = router_stats.first_time(0, 0)
    out = router_stats.restrained(logits, 0, CHUNK, first)
    return router_stats.balanced(out, scored, 0, CHUNK, first)


def test_the_optimizers_scale_reaches_both_losses() -> None:
    rules, gradients = Balancing(EXPERTS, TOPK, (("load_balancing_loss", 0.3),), 0.05), []
    for scale in (1.0, torch.tensor(8.0)):
        router_stats = RouterStats(rules, [WHOLE], 1, Pools.each_alone([(WHOLE,)]), scale)
        generator = torch.Generator().manual_seed(2)
        logits = torch.randn(TOKENS, EXPERTS, generator=generator).requires_grad_()
        passed(router_stats, logits).backward(torch.zeros(TOKENS, EXPERTS))
        gradients.append(logits.grad)
    assert gradients[0].any()
    torch.testing.assert_close(8 * gradients[0], gradients[1])


def test_without_losses_nothing_is_attached() -> None:
    pools = Pools.each_alone([(WHOLE,)])
    router_stats = RouterStats(Balancing(EXPERTS, TOPK), [WHOLE], 1, pools, 1.0)
    logits = torch.randn(TOKENS, EXPERTS).requires_grad_()
    assert passed(router_stats, logits) is logits
    assert router_stats.losses() == {}
