"""A head whose backward runs in its forward: same numbers, no logits from F to B."""

import pytest
import torch
from torch import Tensor, nn

from megatron_epp.layers.lm_head.fused_loss import fused_backward
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import SavedBytesMeter

ROWS, HIDDEN, VOCABULARY = 20, 6, 50


def run(block: int | None) -> tuple[int, int, Tensor, list[Tensor]]:
    """(bytes held, most bytes, loss, gradients); None: the plain head."""
    torch.manual_seed(0)
    first = nn.Linear(HIDDEN, HIDDEN).double()
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False).double()
    x = torch.randn(ROWS, 1, HIDDEN, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (1, ROWS))
    weights = (torch.arange(ROWS) % 3 > 0).double()[None] * 2.5

    def losses(hidden_t1H: Tensor, rows: slice) -> Tensor:
        logits = head(hidden_t1H)[:, 0]
        return nn.functional.cross_entropy(logits, labels[0, rows], reduction="none")[None]

    meter = SavedBytesMeter([*first.parameters(), *head.parameters()])
    with meter.watch(Store({})):
        hidden = first(x)
        if block is None:
            token_losses = losses(hidden, slice(0, ROWS))
        else:
            token_losses = fused_backward(hidden, weights, losses, block)
        total = (token_losses * weights).sum()
        held, most = meter.now, meter.op_peak()
        total.backward()
    return held, most, total.detach(), [p.grad for p in (*first.parameters(), head.weight)]


@pytest.mark.parametrize("block", [1, 7, 20, 100])
def test_numbers_are_the_plain_heads(block) -> None:
    *_, loss, kept = run(None)
    *_, fused_loss, early = run(block)
    assert torch.allclose(fused_loss, loss, rtol=1e-14, atol=0)
    for mine, theirs in zip(early, kept, strict=True):
        assert (mine - theirs).abs().max() <= 1e-13 * theirs.abs().max()


def test_logits_live_a_block_at_a_time() -> None:
    logits = ROWS * VOCABULARY * 8
    held, *_ = run(None)
    assert held >= logits
    early_held, early_most, *_ = run(5)
    assert early_held < logits / 3
    assert early_most < early_held + logits / 2
