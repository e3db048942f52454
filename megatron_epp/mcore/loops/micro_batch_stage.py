"""Stage of a loop's model for the executor, with every micro-batch as a chunk.

The stage calls Megatron's own ``forward_step`` and ``backward_step``, so losses are scaled, timed
and collected as in Megatron's schedules. Only the order of these calls is planned.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from megatron_epp.ir import Kind, Plan
from megatron_epp.mcore.loops.attached import attached
from megatron_epp.mcore.loops.call_arguments import LoopCall
from megatron_epp.mcore.loops.microbatch_iterators import MicroBatches
from megatron_epp.mcore.loops.replica.redone_call import WrongShape
from megatron_epp.mcore.model.attention import this_device
from megatron_epp.mcore.model.stage import ModelStage
from megatron_epp.runtime.kv_store import Store


class NoBatchBuilder:
    """Batch builder that reads no data, because the loop's forward step draws its own data."""

    def __init__(self, stage: int, device: torch.device):
        self.stage, self.device = stage, device

    def prepare(self, chunk: int) -> None:
        """Do nothing: no data is read ahead."""


class MicroBatchStage(ModelStage):
    """Stage that runs whole micro-batches.

    ``cp_size`` is the number of context-parallel ranks. ``shape(chunk)`` is the expected shape of a
    message to the next stage; another shape raises a WrongShape. In an interleaved pipeline, the
    model of ``call`` is model chunk ``vp_stage`` of the rank, and ``config`` is its configuration.
    ``data[chunk]`` contains the chunk's entries of Megatron's forward_data_store.
    """

    def __init__(
        self,
        call: LoopCall,
        batches: MicroBatches,
        plan: Plan,
        stage: int,
        cp_size: int,
        shape: Callable[[int], tuple[int, ...]],
        vp_stage: int | None = None,
        config: Any = None,
    ):
        builder: Any = NoBatchBuilder(stage, this_device())
        config = config or call.config
        super().__init__(call.one_model, config, call.forward_step_func, builder, plan, Store({}))
        self._of_part = {} if vp_stage is None else {"vp_stage": vp_stage}
        self.call, self.batches, self.cp_size, self.shape = call, batches, cp_size, shape
        self.data: dict[int, list[Any]] = {}
        forwards = [op.chunk for op in plan.orders[stage] if op.kind is Kind.FORWARD]
        elastic = attached(call.one_model)
        planned = elastic is not None and elastic.memory is not None and plan.stages > 1
        self._attached = elastic if planned and self.training else None
        self._first, self._number = forwards[0], {c: n for n, c in enumerate(forwards)}

    def _stats_of_routers(self, plan: Plan) -> None:
        """Return None, because Megatron computes the MoE auxiliary losses per micro-batch."""

    def _forward(self, chunk: int, received: Tensor | None) -> Tensor | None:
        call = self.call
        if received is not None and self.training:
            received.requires_grad_()
        data: list[Any] = []
        with self._deferring(chunk), self._recomputing(chunk):
            output, tokens = schedules.forward_step(
                call.forward_step_func,
                self.batches.only(chunk),
                self.model,
                call.num_microbatches,
                received,
                data,
                self.config,
                self.cp_size,
                collect_non_loss_data=call.collect_non_loss_data,
                is_first_microbatch=schedules.check_first_val_step(
                    call.first_val_step, call.forward_only, chunk == self._first
                ),
                current_microbatch=self._number[chunk],
                is_last_stage=self.is_last,
                **self._of_part,
            )
        self.tokens = self.tokens + tokens
        if self.is_last:
            self.data[chunk] = data
            if self.training:
                self._saved[chunk] = received, scalar(output, f"micro-batch {chunk}")
            return None
        expected = self.shape(chunk)
        if tuple(output.shape) != expected:
            raise WrongShape(chunk, expected, tuple(output.shape))
        return self._detached(chunk, received, output)

    def _recomputing(self, chunk: int) -> AbstractContextManager[None]:
        if self._attached is None:
            return nullcontext()
        return self._attached.recomputing(self._recompute[chunk])

    def in_callers_order(self) -> list[Any]:
        """Return the last stage's forward_data_store in the loop's order; [] on other stages."""
        return [item for chunk in sorted(self.data) for item in self.data[chunk]]


def scalar(loss: Any, whose: str) -> Tensor:
    """Return ``loss`` unchanged after checking that it is a tensor of one element.

    Raises:
        ValueError: ``loss`` is not a tensor, or has several elements. The message begins with
            ``whose``.
    """
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"{whose}: the loss is of type {type(loss).__name__}; expected a tensor of one number"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"{whose}: the loss has shape {tuple(loss.shape)}; expected one number (sum it, or "
            "take its mean, in the loss function)"
        )
    return loss
