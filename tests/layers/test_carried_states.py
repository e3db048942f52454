"""A state carried over the borders between slices, through the store that keeps K and V: as many
rows as there are borders, whatever the tokens."""

import numpy
import pytest
import torch
from torch import Tensor

from megatron_epp.ir import Kind, Plan, slices_of
from megatron_epp.layers.chunk_state import chunk_rows, store_for
from megatron_epp.runtime.kv_store import Store

HEADS, SIZE, TAPS = 2, 3, 2  # a state [heads, size]; the last rows that a convolution sees
LAYER = 0
PLAN = """plan v1
replica 0 of 1
documents {0}
layers 1
chunk 0: 0[0:{1}]
chunk 1: 0[{1}:{2}]
chunk 2: 0[{2}:{0}]
recompute 0: 1k 1k 1k
stage 0: F0 F1 F2 B2 B1 B0
"""


def mixed(x_TS: Tensor, decay_S: Tensor, state_S: Tensor, tail_PS: Tensor) -> tuple[Tensor, ...]:
    """A convolution over rows and what stands before them, and a decaying sum: the outputs, and
    what the next slice begins with."""
    rows_S = torch.cat((tail_PS, x_TS))
    outputs = []
    for row in range(len(x_TS)):
        state_S = decay_S * state_S + rows_S[row : row + TAPS + 1].sum(0).tanh()
        outputs.append(state_S)
    return torch.stack(outputs), state_S, rows_S[len(rows_S) - TAPS :]


class Take(torch.autograd.Function):
    """The state at border ``border``, from the store; its gradient goes there."""

    @staticmethod
    def forward(ctx, anchor: Tensor, store: Store, border: int):
        ctx.store, ctx.border = store, border
        return tuple(part[0].clone() for part in store.context(LAYER, 0, border + 1, border))

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        ctx.store.add_window_gradient(LAYER, 0, ctx.border, *(g[None] for g in gradients))
        return None, None, None


class Keep(torch.autograd.Function):
    """``outputs`` as they are, the state behind them into the store; backward finds what the next
    slice left for it."""

    @staticmethod
    def forward(ctx, outputs: Tensor, state: Tensor, tail: Tensor, store: Store, border: int):
        ctx.store, ctx.border = store, border
        rows = len(store.borders[0])
        store.append(LAYER, 0, border, state[None], tail[None], rows)
        return outputs.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        store, border = ctx.store, ctx.border
        found = store.gradient(LAYER, 0, border, border + 1)
        of_state, of_tail = (part[0].clone() for part in found)
        if border == 0:
            store.release(LAYER, 0)
        return gradient, of_state, of_tail, None, None


@pytest.mark.parametrize("scale", [1, 5])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "run again"])
def test_gradients_are_those_of_the_whole(scale: int, again: bool) -> None:
    """``again``: backward meets a forward that was run a second time, as of a recomputed layer."""
    torch.manual_seed(7)
    borders, length = (4 * scale, 7 * scale), 12 * scale
    plan = Plan.parse(PLAN.format(length, *borders))
    x = torch.randn(length, HEADS, SIZE, dtype=torch.float64, requires_grad=True)
    decay = torch.rand(HEADS, SIZE, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    nothing = torch.zeros(HEADS, SIZE), torch.zeros(TAPS, HEADS, SIZE)
    begin = tuple(part.double() for part in nothing)
    (mixed(x, decay, *begin)[0] * weight).sum().backward()
    wanted = x.grad.clone(), decay.grad.clone()
    x.grad = decay.grad = None

    store = store_for(plan, slices_of(plan), stores_last_slice=False)
    assert store.borders == {0: borders}
    sizes, losses = [], {}

    def forward(chunk: int) -> Tensor:
        (rows,) = chunk_rows(plan, slices_of(plan), chunk)
        part = slice(rows.span.start, rows.span.stop)
        before = borders.index(rows.span.start) if rows.span.start else None
        carried = begin if before is None else Take.apply(decay, store, before)
        outputs, *after = mixed(x[part], decay, *carried)
        if not rows.last:
            outputs = Keep.apply(outputs, *after, store, borders.index(rows.span.stop))
        return (outputs * weight[part]).sum()

    for op in plan.orders[0]:
        if op.kind is Kind.FORWARD:
            losses[op.chunk] = forward(op.chunk)
            sizes.append(store.bytes)
        else:
            (forward(op.chunk) if again else losses[op.chunk]).backward()
    one = (HEADS * SIZE + TAPS * HEADS * SIZE) * 8
    assert sizes == [len(borders) * one] * 3  # not a byte more for five times the tokens
    assert store.peak_bytes == 2 * len(borders) * one and store.bytes == 0 and not len(store)
    for found, whole in zip((x.grad, decay.grad), wanted, strict=True):
        numpy.testing.assert_allclose(found, whole, rtol=1e-12, atol=1e-12)
