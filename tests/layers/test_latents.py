"""Attention over contexts that are kept as latents equals attention over whole documents."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_epp.cost.kinds.mla import CONTEXT_BLOCK
from megatron_epp.ir import Plan
from megatron_epp.layers import mla
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.mla import LatentKV, LatentKVAttention
from tests.layers.runner import (
    LAYER,
    ROWS,
    SCALE,
    Documents,
    Runner,
    drawn,
    require_close,
    sliced_plan,
)

HEADS, PLAIN, ROTARY, VALUE, RANK = 3, 6, 4, 5, 7


def documents(lengths: tuple[int, ...]) -> tuple[Documents, Tensor]:
    """q, latent, rotated key and the gradient of the output; and the up-projection."""
    shapes = (HEADS, PLAIN + ROTARY), (1, RANK), (1, ROTARY), (HEADS, VALUE)
    ((weight,),) = drawn((HEADS * (PLAIN + VALUE),), [(RANK,)], seed=4)
    return drawn(lengths, shapes, seed=3), weight


def expanded(latent: Tensor, rotary: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    made = (latent[:, 0] @ weight.t()).unflatten(-1, (HEADS, -1))
    key, value = made.split([PLAIN, VALUE], -1)
    return torch.cat((key, rotary.expand(-1, HEADS, -1)), -1), value.contiguous()


def naive(given: Documents, weight: Tensor) -> tuple[list[tuple[Tensor, ...]], Tensor]:
    """(out, dq, dlatent, drotary) of each document, and the weight's gradient."""
    weight = weight.clone().requires_grad_()
    results, total = [], torch.zeros_like(weight)
    for q, latent, rotary, grad in given:
        inputs = tuple(t.clone().requires_grad_() for t in (q, latent, rotary))
        k, v = expanded(inputs[1], inputs[2], weight)
        scores = torch.einsum("thd,shd->hts", inputs[0], k) * SCALE
        hidden = torch.ones(len(q), len(q)).triu(1).bool()
        out = torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        *gradients, of_weight = torch.autograd.grad(out, (*inputs, weight), grad)
        results.append((out.detach(), *gradients))
        total += of_weight
    return results, total


class LatentRunner(Runner):
    drop = False

    def __init__(self, plan: Plan, given: Documents, weight: Tensor, multiple: int = 1):
        super().__init__(plan, given, multiple)
        self.weights = (weight.clone().requires_grad_(),)

    def attention(self, state: ChunkState, inputs: tuple[Tensor, ...]) -> Tensor:
        q, latent, rotary = inputs
        k, v = expanded(latent, rotary, *self.weights)
        made_of = LatentKV(latent, rotary, *self.weights)
        out, again = LatentKVAttention(SCALE)(q, k, v, made_of, state, LAYER, self.drop)
        assert again is None or torch.equal(again.value(), out)
        return out


class Dropping(LatentRunner):
    drop = True


@pytest.mark.parametrize("runner", [LatentRunner, Dropping])
@pytest.mark.parametrize("block", [1, 4, 2048])
@pytest.mark.parametrize("name", [name for name in ROWS if "[" in str(ROWS[name])])
def test_slices_compute_what_whole_documents_compute(name, block, runner) -> None:
    plan = ROWS[name]
    given, weight = documents(plan.documents)
    with patch.object(mla, "BLOCK", block):
        run = runner(plan, given, weight, multiple=4)
        results = run.run()
    expected, of_weight = naive(given, weight)
    require_close(results, expected)
    require_close([(sum(each for (each,) in run.learnt),)], [(of_weight,)])


@pytest.mark.parametrize("sizes", [(10, 5), (5, 10), (7, 7)])
def test_values_may_have_another_size_than_keys(sizes) -> None:
    size, value = sizes
    given = drawn((9,), [(2, width) for width in (size, size, value, value)])
    *inputs, grad = (tensor.clone().requires_grad_() for tensor in given[0])
    scores = torch.einsum("thd,shd->hts", inputs[0], inputs[1]) * SCALE
    hidden = torch.ones(9, 9).triu(1).bool()
    out = torch.einsum(
        "hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), inputs[2]
    )
    expected = torch.autograd.grad(out, inputs, grad)
    require_close(Runner(sliced_plan(9, 3), given).run(), [(out, *expected)])


def test_planners_know_the_block() -> None:
    assert CONTEXT_BLOCK == mla.BLOCK
