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


def material(dtype: torch.dtype, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, labels, weights of the losses."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64) * spread
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    weights = (torch.arange(ROWS) % 3 > 0).double() * 2.5
    return hidden.to(dtype), weight.to(dtype), labels, weights


def plain(dtype: torch.dtype, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """losses, gradients of hidden and weight."""
    hidden, weight, labels, weights = material(dtype, spread)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight.t()
    kind = torch.promote_types(dtype, torch.float32)
    losses = nn.functional.cross_entropy(logits.to(kind), labels, reduction="none")
    (losses * weights.to(kind)).sum().backward()
    return losses.detach(), hidden.grad, weight.grad


def chained(
    dtype: torch.dtype, shards: int, block: int, spread: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, labels, weights = material(dtype, spread)
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
    for mine, theirs in zip(
        chained(torch.float64, shards, block, spread), plain(torch.float64, spread), strict=True
    ):
        assert (mine - theirs).abs().max() <= 1e-13 * theirs.abs().max()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_in_bf16_it_errs_no_more_than_twice_as_much_as_the_plain_head(shards) -> None:
    exact = plain(torch.float64)
    rounded = [tensor.double() for tensor in material(torch.bfloat16)[:2]]
    hidden, weight, labels, weights = rounded[0], rounded[1], *material(torch.bfloat16)[2:]
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    losses = nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="none")
    (losses * weights).sum().backward()
    exact = losses.detach(), hidden.grad, weight.grad
    for mine, theirs, true in zip(
        chained(torch.bfloat16, shards, 7), plain(torch.bfloat16), exact, strict=True
    ):
        assert (mine.double() - true).norm() <= 2 * (theirs.double() - true).norm()


def test_without_a_gradient_no_rows_are_made() -> None:
    hidden, weight, labels, _ = material(torch.float64)
    halves = [
        statistics(hidden, labels, OutputWeightShard(part, first, 7), gradient=False)
        for part, first in zip(weight.chunk(2), (0, VOCABULARY // 2), strict=True)
    ]
    merged = halves[0].merged(halves[1])
    assert merged.rows is None
    assert torch.allclose(merged.losses_t, plain(torch.float64)[0], rtol=1e-13, atol=0)


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
