"""Order in which gradients are reported to DDP when the last op of a stage is a W or G.

Megatron's DDP starts the reduction of a bucket when all its parameters are reported ready. Hooks
report each parameter once per iteration, in the last backward. All replicas must start their
buckets in the same order, but the last op is a B in some replicas' plans and a W in others. If the
last op is a W, two ops complete the gradients:

    ... I3 W0 I2 W3 W2        I2: last gradients of norms, biases, embeddings
                              W2: last gradients of the linear layers' weights

With vocabulary parallelism, a B and a G complete the gradients. Therefore the stage's last B or I
reports no gradients, but records the order in which a B would report them. The last W or G then
reports all gradients in this order, and computes deferred gradients when their turn comes. The LM
head is always reported first, no matter which op completes its gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn import Parameter

from megatron_epp.layers.moe.weight_stack import stacks_of
from megatron_epp.layers.wgrad.linear import DeferredWeightGrads


class ReadyOrder:
    """Recorder of the order in which a backward completes gradients.

    Args:
        model: Stage module.
        report: Function that reports a parameter's complete gradient to DDP.
        first: Parameters whose gradients only G computes; they are reported first.
    """

    def __init__(
        self,
        model: nn.Module,
        report: Callable[[Parameter], None],
        first: Sequence[Parameter] = (),
    ):
        apart = set(first)
        self._parameters = [p for p in model.parameters() if p.requires_grad and p not in apart]
        self._stacks = stacks_of(model)
        self._report = report
        self._first = tuple(first)
        self._order: dict[Parameter, None] = {}
        self._noting = False

    def note(self, parameter: Parameter) -> None:
        """Append ``parameter`` to the order in which :meth:`finish` reports gradients to DDP.

        The parameters' hooks call this method when a gradient is accumulated. Linear layers call it
        when a weight gradient is deferred to W. If a weight is used several times, its last use
        determines the order. Outside of :meth:`noting`, the method does nothing.
        """
        if self._noting:
            self._order.pop(parameter, None)
            self._order[parameter] = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record the order of gradients in this context, in which the stage's last B or I runs.

        During the context, the parameters have hooks that call :meth:`note`. Stacks of experts,
        whose weights autograd does not reach, call :meth:`note` instead of reporting to DDP.
        """
        handles = [p.register_post_accumulate_grad_hook(self.note) for p in self._parameters]
        reports = [stack.report for stack in self._stacks]
        for stack in self._stacks:
            stack.report = self._note_all
        self._noting = True
        try:
            yield
        finally:
            self._noting = False
            for stack, report in zip(self._stacks, reports, strict=True):
                stack.report = report
            for handle in handles:
                handle.remove()

    def _note_all(self, weights: Sequence[Parameter]) -> None:
        for weight in weights:
            self.note(weight)

    def finish(self, deferred: DeferredWeightGrads | None = None) -> None:
        """Report all parameters to DDP in the recorded order, and clear the order.

        Call this method in the stage's last W or G, after DDP's hooks are enabled.

        Args:
            deferred: Weight gradients of the last W, which this method computes. None in the last
                G; in that case, the parameters ``first`` must already be reported.
        """
        if deferred is None:
            deferred = DeferredWeightGrads()
        else:
            for parameter in self._first:
                self._report(parameter)
        held = {parameter for parameter in self._order if parameter in deferred}
        for parameter in self._order:
            if parameter in deferred:
                # DDP's hooks report it, and gradients that are computed with it.
                deferred.accumulate(parameter)
            elif parameter not in held:
                self._report(parameter)
        self._order.clear()
        assert not len(deferred), "the last W holds a weight that the last I had not"
