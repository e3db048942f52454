"""I and W of a linear layer are its B taken apart: the same numbers, the same hooks, less alive."""

import gc
import weakref

import pytest
import torch
from torch.nn import Parameter
from torch.nn.functional import linear as torch_linear
from torch.utils.checkpoint import checkpoint

from megatron_epp.layers.wgrad.linear import DeferredWeightGrads, Linear, deferred_linear
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import SavedBytesMeter

T, K, N = 5, 7, 3


def parameters(dtype=torch.float32) -> tuple[Parameter, Parameter]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(N, K, generator=generator, dtype=dtype)
    return Parameter(weight), Parameter(torch.randn(N, generator=generator, dtype=dtype))


def chunk(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input that asks for its gradient, and the output's gradient; [T, 1, *] as Megatron's."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(T, 1, K, generator=generator).requires_grad_(),
        torch.randn(T, 1, N, generator=generator),
    )


def test_i_and_w_are_b():
    (weight, bias), (plain_weight, plain_bias) = parameters(), parameters()
    linear = Linear(weight)
    deferreds = [DeferredWeightGrads(), DeferredWeightGrads()]
    for seed, deferred in enumerate(deferreds):
        (x, gradient), (plain_x, _) = chunk(seed), chunk(seed)
        y = deferred_linear(x, bias, linear, deferred)
        plain = torch_linear(plain_x, plain_weight, plain_bias)
        assert torch.equal(y, plain)
        y.backward(gradient)
        plain.backward(gradient)
        assert torch.equal(x.grad, plain_x.grad)
    assert weight.grad is None
    assert torch.allclose(bias.grad, plain_bias.grad, rtol=1e-6)
    for deferred in deferreds:
        assert deferred.weights == (weight,)
        deferred.accumulate_all()
        assert not len(deferred)
    assert torch.equal(weight.grad, plain_weight.grad)


def test_hooks_on_the_weight_run_once_per_w_and_not_in_i():
    weight, _ = parameters()
    ran = []
    weight.register_post_accumulate_grad_hook(lambda p: ran.append(p.grad.clone()))
    deferred = DeferredWeightGrads()
    x, gradient = chunk(0)
    deferred_linear(x, None, Linear(weight), deferred).backward(gradient)
    assert not ran
    deferred.accumulate(weight)
    assert len(ran) == 1
    assert torch.equal(ran[0], weight.grad)


def test_roots_come_in_the_order_of_backward_and_are_noticed():
    (first, _), (second, _) = parameters(), parameters()
    second = Parameter(second.detach().t().contiguous())
    noticed = []
    deferred = DeferredWeightGrads(noticed.append)
    x, _ = chunk(0)
    hidden = deferred_linear(x, None, Linear(first), deferred)
    deferred_linear(hidden, None, Linear(second), deferred).sum().backward()
    assert deferred.weights == (second, first)
    assert noticed == [second, first]


def test_a_recomputed_linear_defers_in_the_recomputation():
    (weight, _), (plain_weight, _) = parameters(), parameters()
    deferred = DeferredWeightGrads()
    x, gradient = chunk(0)
    y = checkpoint(
        lambda t: deferred_linear(t.tanh(), None, Linear(weight), deferred), x, use_reentrant=True
    )
    assert not len(deferred)
    y.backward(gradient)
    deferred.accumulate_all()
    plain_x, _ = chunk(0)
    torch_linear(plain_x.tanh(), plain_weight).backward(gradient)
    assert torch.equal(weight.grad, plain_weight.grad)
    assert torch.equal(x.grad, plain_x.grad)


def test_between_i_and_w_the_meter_sees_inputs_and_gradients_and_nothing_else():
    weight, _ = parameters()
    meter = SavedBytesMeter([weight])
    deferred = DeferredWeightGrads()
    x, gradient = chunk(0)
    store = Store({})
    with meter.watch(store):
        hidden = x.exp()  # saves its output, which is the linear's input: one storage
        y = deferred_linear(hidden, None, Linear(weight), deferred).square()
        assert meter.now == 4 * T * (K + N)  # square saves the output
        y.backward(gradient)
        del y
        # The output's gradient is a tensor of its own; exp and square have nothing left.
        assert meter.now == 4 * T * (K + N)
        deferred.accumulate_all()
        assert meter.now == 0


class _Marked(torch.autograd.Function):
    """Its node holds ``mark``."""

    @staticmethod
    def forward(ctx, tensor, mark):
        ctx.mark = mark
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Mark:
    pass


def test_the_graph_of_the_chunk_does_not_live_until_w():
    weight, _ = parameters()
    deferred = DeferredWeightGrads()
    x, gradient = chunk(0)
    mark = _Mark()
    alive = weakref.ref(mark)
    y = deferred_linear(_Marked.apply(x, mark), None, Linear(weight), deferred)
    del mark
    assert alive() is not None
    y.backward(gradient)
    del y
    gc.collect()
    assert len(deferred) == 1
    assert alive() is None


def test_rows_are_scattered_or_summed_not_both():
    weight, _ = parameters()
    with pytest.raises(AssertionError, match="scatter"):
        Linear(weight, None, gathers=True, reduces=True)
