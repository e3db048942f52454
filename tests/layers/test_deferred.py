"""What lives between I and W of a linear layer. Their numbers, in whatever order: certificates with
backwards in halves, and tests/engine/test_deferred.py."""

import gc
import weakref

import torch
from torch.nn import Parameter

from megatron_epp.layers.wgrad.linear import DeferredWeightGrads, Linear, deferred_linear
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import SavedBytesMeter

T, K, N = 5, 7, 3


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


def test_between_i_and_w_inputs_and_gradients_are_held_and_no_graph():
    weight = Parameter(torch.randn(N, K))
    meter, deferred = SavedBytesMeter([weight]), DeferredWeightGrads()
    x, gradient = torch.randn(T, 1, K, requires_grad=True), torch.randn(T, 1, N)
    with meter.watch(Store({})):
        mark = _Mark()
        alive = weakref.ref(mark)
        hidden = _Marked.apply(x, mark).exp()  # saves its output, the linear's input: one storage
        del mark
        y = deferred_linear(hidden, None, Linear(weight), deferred).square()
        del hidden
        assert meter.now == 4 * T * (K + N)  # square saves the output
        assert alive() is not None
        y.backward(gradient)
        del y
        gc.collect()
        # The output's gradient is a tensor of its own; exp and square have nothing left.
        assert meter.now == 4 * T * (K + N)
        assert alive() is None and deferred.weights == (weight,)
        deferred.accumulate_all()
        assert meter.now == 0 == len(deferred)
