"""One stage of the model as the executor sees it: what F and B compute."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
)
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_epp.ir import BACKWARDS, Kind, Op, Plan
from megatron_epp.mcore.feed import ChunkBatch, Feed
from megatron_epp.runtime.store import Store

# forward_step(iterator over one ChunkBatch, model) -> (output, loss_of(output)); the last stage's
# loss_of gives (loss summed over tokens, number of tokens, report for the log).
ForwardStep = Callable[[Iterator[ChunkBatch], Any], tuple[Tensor, Callable]]



class ModelStage:
    """Runs chunks of one plan through Megatron's model; honours what its schedules honour.

    Gradients accumulate without reduction until the last backward of the stage, whose hooks start
    the overlapped reduction; the loss is scaled as the optimizer wants it; outputs are freed as
    soon as they are sent.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        forward_step: ForwardStep,
        feed: Feed,
        plan: Plan,
        store: Store,
    ):
        self.model, self.config, self.forward_step = model, config, forward_step
        self.feed, self.store = feed, store
        self.stage = feed.stage
        self.is_last = self.stage == plan.stages - 1
        self.training = not plan.forward_only
        self.tokens: Tensor | int = 0
        self.reports: list[dict[str, Tensor]] = []
        self._saved: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._last_backward = self._find_last_backward(plan.orders[self.stage])
        self._no_sync = ExitStack()

    @staticmethod
    def _find_last_backward(order: tuple[Op, ...]) -> Op | None:
        kinds = (*BACKWARDS, Kind.WEIGHT)
        return next((op for op in reversed(order) if op.kind in kinds), None)

    # -------------------------------------------------------------- an iteration

    def __enter__(self) -> "ModelStage":
        if self.training and self.config.no_sync_func is not None:
            self._no_sync.enter_context(self.config.no_sync_func())
        return self

    def __exit__(self, *error: Any):
        self._no_sync.close()
        if error[0] is None and self.training:
            assert not self._saved, "a chunk's forward has no backward"
            # Megatron's overlapped reduction by hooks runs on the first stage only when gradient
            # reduction is aligned over the stages (schedules.py: grad_sync_func).
            if self.config.grad_sync_func is not None and self.stage > 0:
                self.config.grad_sync_func(self.model.parameters())

    # -------------------------------------------------------------- ops

    def forward(self, chunk: int, received: Tensor | None) -> Tensor | None:
        if received is not None and self.training:
            received.requires_grad_()
        get_attr_wrapped_model(self.model, "set_input_tensor")([received])
        batch = self.feed.batch(chunk, self.store, self.training)
        output, loss_of = self.forward_step(iter((batch,)), self.model)
        if self.is_last:
            loss, tokens, report = loss_of(output)
            self.tokens = self.tokens + tokens
            self.reports.append(report)
            if self.training:
                self._saved[chunk] = received, loss
            return None
        sent = output.detach()
        if self.training:
            self._saved[chunk] = received, output
            # Autograd needs the node, not the data; ``sent`` keeps that until it has left.
            deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)
        return sent

    def backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        self._before(Op(Kind.BACKWARD, chunk))
        received, output = self._saved.pop(chunk)
        return backward_step(received, output, gradient, self.config)

    def input_backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        raise NotImplementedError("refused when the plan was accepted")

    def weight_backward(self, chunk: int) -> None:
        raise NotImplementedError("refused when the plan was accepted")

    def _before(self, op: Op):
        """Let the last backward's hooks start the overlapped gradient reduction."""
        if op == self._last_backward and (self.config.grad_sync_func is None or self.stage == 0):
            self._no_sync.close()


def sum_reports(reports: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """One report for the whole iteration: every entry summed over the chunks."""
    if not reports:
        return []
    return [{key: torch.stack([r[key] for r in reports]).sum(0) for key in reports[0]}]
