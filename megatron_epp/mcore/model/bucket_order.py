"""Gradients ready once each, in one order, when the last op of a stage is a W.

Megatron's DDP starts the reduction of a bucket of parameters when each of them has been reported
ready as often as in the first iteration, which is once, by the hooks of the last backward. All
replicas must start their buckets in the same order, and the last op of another replica's plan may
be a B. With W last the hooks of a last B are spread over two ops:

    ... I3 W0 I2 W3 W2        I2: last gradients of norms, biases, embeddings
                              W2: last gradients of the linear layers' weights

or, where the output layer lies over the stages, over a B and a G. So nothing is reported at the
stage's last B or I, but the order is noted in which a B would have reported; the last W or G goes
through that order, computes what was deferred, and reports the rest as it comes by. The output
layer comes first, whichever op made its last gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn import Parameter

from megatron_epp.layers.wgrad.linear import DeferredWeightGrads


class ReadyOrder:
    """``report(parameter)`` tells DDP that a gradient is complete. ``first``: weights whose
    gradients an op of their own makes."""

    def __init__(
        self,
        model: nn.Module,
        report: Callable[[Parameter], None],
        first: Sequence[Parameter] = (),
    ):
        apart = set(first)
        self._parameters = [p for p in model.parameters() if p.requires_grad and p not in apart]
        self._report = report
        self._first = tuple(first)
        self._order: dict[Parameter, None] = {}
        self._noting = False

    def note(self, parameter: Parameter) -> None:
        """Its gradient was accumulated, or set aside: here a B reports it; of a weight that is used
        several times, when the last comes."""
        if self._noting:
            self._order.pop(parameter, None)
            self._order[parameter] = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Around the stage's last B or I."""
        handles = [p.register_post_accumulate_grad_hook(self.note) for p in self._parameters]
        self._noting = True
        try:
            yield
        finally:
            self._noting = False
            for handle in handles:
                handle.remove()

    def finish(self, deferred: DeferredWeightGrads | None = None) -> None:
        """The stage's last W, with DDP's hooks awake, or its last G, which has woken them for the
        first and left nothing ``deferred``."""
        if deferred is None:
            deferred = DeferredWeightGrads()
        else:
            for parameter in self._first:
                self._report(parameter)
        held = {parameter for parameter in self._order if parameter in deferred}
        for parameter in self._order:
            if parameter in deferred:
                deferred.accumulate(parameter)  # its hook reports, and that of what comes with it
            elif parameter not in held:
                self._report(parameter)
        self._order.clear()
        assert not len(deferred), "the last W holds a weight that the last I had not"
