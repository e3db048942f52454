"""A head whose words lie on several ranks: the plain head's loss and gradients."""

import math

import pytest
import torch
from torch import Tensor, nn

from megatron_epp.layers.lm_head.vocabulary import (
    OutputWeightShard,
    Packing,
    Statistics,
    statistics,
    weight_gradients,
)

ROWS, HIDDEN, VOCABULARY = 20, 6, 48


def material(spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, labels, weights of the losses."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64) * spread
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    return hidden, weight, labels, (torch.arange(ROWS) % 3 > 0).double() * 2.5


def plain(spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """losses, gradients of hidden and weight."""
    hidden, weight, labels, weights = material(spread)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    losses = nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="none")
    (losses * weights).sum().backward()
    return losses.detach(), hidden.grad, weight.grad


def chained(shards: int, block: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, labels, weights = material(spread)
    every = [
        OutputWeightShard(part, VOCABULARY // shards * index, block)
        for index, part in enumerate(weight.chunk(shards))
    ]
    so_far: Statistics | None = None
    for words in every:
        own = statistics(hidden, labels, words, gradient=True)
        so_far = own if so_far is None else so_far.merged(own)
    assert so_far is not None and so_far.rows is not None
    gradients = [
        sum(weight_gradients(hidden, labels, weights, so_far.lse_t, words)) for words in every
    ]
    return so_far.losses_t, so_far.rows.gradient(weights), torch.cat(gradients)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("block", [1, 7, 100])
@pytest.mark.parametrize("spread", [1.0, 300.0])  # logits of a thousand: exp would overflow
def test_numbers_are_the_plain_heads(shards, block, spread) -> None:
    """In bf16: the certificate of two stages in tests/engine/test_certificate.py."""
    for mine, theirs in zip(chained(shards, block, spread), plain(spread), strict=True):
        assert (mine - theirs).abs().max() <= 1e-13 * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, hidden", [(5, 3), (4, 6)])  # odd: numbers of two sizes lie askew
def test_a_message_brings_what_was_packed_to_the_last_bit(dtype, rows, hidden) -> None:
    kind = torch.promote_types(dtype, torch.float32)
    wide = tuple(torch.randn(rows, hidden).to(dtype) for _ in range(3))
    narrow = torch.randn(rows).to(kind), torch.tensor([math.inf, 1e-30, -0.0, 3, 4])[:rows].to(kind)
    layout = Packing(rows, hidden, 3, 2, dtype)
    flat = layout.pack(wide, narrow)
    assert flat.dtype == dtype and flat.shape == (layout.elements,)
    again = layout.unpack(flat)
    for sent, got in zip((*wide, *narrow), (*again[0], *again[1]), strict=True):
        assert torch.equal(sent, got)
    numbers = 2 if dtype is torch.bfloat16 else 1
    assert layout.elements == rows * (3 * hidden + 2 * numbers)
