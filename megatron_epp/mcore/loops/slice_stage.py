"""One stage of a loop's model as the executor sees it, where documents are cut.

last stage   F of every chunk of a micro-batch    outputs per token are kept, without a graph
             behind the last of them              the loop's loss, once, on whole documents
             B of a chunk                         from the loss' gradient at its tokens
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_epp.ir import Kind, Op, Plan, PlanError, slices_of
from megatron_epp.layers.chunk_state import ChunkState, chunk_rows, store_for
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.loops.adapter import rows_of, side_by_side
from megatron_epp.mcore.loops.attached import AttachedModel
from megatron_epp.mcore.loops.call_arguments import LoopCall
from megatron_epp.mcore.loops.micro_batch_stage import NoBatchBuilder, scalar
from megatron_epp.mcore.loops.microbatch_iterators import MicroBatches, SingleValue
from megatron_epp.mcore.model.attention import this_device
from megatron_epp.mcore.model.stage import ModelStage


def padded_rows(plan: Plan, chunk: int, multiple: int) -> int:
    """Rows of the chunk over all ranks: its tokens, padded."""
    return -(-plan.chunks[chunk].tokens // multiple) * multiple


class SliceStage(ModelStage):
    """lengths[micro-batch]: of its documents. multiple: rows of a chunk are padded to it.

    data[micro-batch]   what the loop's loss returned beside the loss
    """

    def __init__(
        self,
        call: LoopCall,
        batches: MicroBatches,
        plan: Plan,
        stage: int,
        cp_size: int,
        attached: AttachedModel,
        lengths: list[tuple[int, ...]],
        multiple: int,
    ):
        self._slices = slices_of(plan)
        store = store_for(plan, self._slices, attached.stores_last_slice)
        builder: Any = NoBatchBuilder(stage, this_device())
        super().__init__(call.one_model, call.config, call.forward_step_func, builder, plan, store)
        self.call, self.batches, self.plan, self.cp_size = call, batches, plan, cp_size
        self.attached, self.multiple = attached, multiple
        self.data: dict[int, list[Any]] = {}
        # Documents are counted through the call; each is document _place[d] of its micro-batch.
        of = [(number, place) for number, of in enumerate(lengths) for place in range(len(of))]
        self._of, self._place = [number for number, _ in of], [place for _, place in of]
        self._documents = [
            [d for d, other in enumerate(self._of) if other == number]
            for number in range(len(lengths))
        ]
        self._group = groups_of(plan, self._of)
        self._left = [self._group.count(number) for number in range(len(lengths))]
        self._outputs: dict[int, dict[int, Tensor]] = {}  # [document][start]
        self._gradients: dict[int, Tensor] = {}  # [document], of whole documents' outputs

    # -------------------------------------------------------------- forward

    def _forward(self, chunk: int, received: Tensor | None) -> Tensor | None:
        config, number = self.config, self._group[chunk]
        if received is not None and self.training:
            received.requires_grad_()
        if config.timers is not None:
            config.timers("forward-compute", log_level=2).start()
        self._left[number] -= 1
        later = self._left[number] > 0  # the loss comes with another chunk
        get_attr_wrapped_model(self.model, "set_input_tensor")([received])
        autocast: Any = nullcontext()
        if config.enable_autocast:
            autocast = torch.autocast("cuda", dtype=config.autocast_dtype)
        with (
            autocast,
            self._deferring(chunk),
            self.attached.computing(self._params(chunk), head_again=later),
        ):
            output, _ = self.forward_step(self._drawn(chunk), self.model)
        if not self.is_last:
            self._stop_timer()
            sent = output.detach()
            if self.training:
                self._saved[chunk] = received, output
                deallocate = self.config.deallocate_pipeline_outputs
                schedules.deallocate_output_tensor(output, deallocate)
            return sent
        self._keep(chunk, output)
        if self.training:
            self._saved[chunk] = received, output
        if later:
            self._stop_timer()
        else:
            self._loss(number)
        return None

    def _stop_timer(self) -> None:
        if self.config.timers is not None:
            self.config.timers("forward-compute").stop()

    def _params(self, chunk: int) -> ChunkParams:
        total = padded_rows(self.plan, chunk, self.multiple)
        rows = chunk_rows(self.plan, self._slices, chunk)
        state = ChunkState(
            chunk,
            rows,
            total,
            self.plan.recompute[self.stage][chunk],
            self.store,
            self.training,
        )
        device = next(self.model.parameters()).device
        positions = torch.zeros(total, dtype=torch.int64)
        for part in rows:
            positions[part.start : part.stop] = torch.arange(part.span.start, part.span.stop)
        return ChunkParams.of(state, positions.to(device, non_blocking=True))

    def _drawn(self, chunk: int) -> Any:
        """The chunk's rows, which the forward step draws, where this rank has an iterator."""
        if not self.batches.readable:
            return self.batches.source
        number = self._group[chunk]
        batch, adapter = self.batches.item(number), self.attached.adapter
        parts = [
            rows_of(adapter, batch, number, self._place[span.document], span.start, span.stop)
            for span in self.plan.chunks[chunk].spans
        ]
        return SingleValue(side_by_side(parts, padded_rows(self.plan, chunk, self.multiple)))

    # -------------------------------------------------------------- the loss

    def _keep(self, chunk: int, output: Any) -> None:
        rows = padded_rows(self.plan, chunk, self.multiple)
        if not isinstance(output, Tensor) or output.dim() < 2 or output.shape[:2] != (1, rows):
            found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"the forward step's output for {self.plan.chunks[chunk]} is {found}; expected a "
                f"tensor [1, {rows}, ...] with one entry for each of the chunk's tokens (its loss, "
                "log-probability, ...), from which the adapter's loss follows"
            )
        start = 0
        for span in self.plan.chunks[chunk].spans:
            piece = output.detach()[0, start : start + span.tokens]
            self._outputs.setdefault(span.document, {})[span.start] = piece
            start += span.tokens

    def _loss(self, number: int) -> None:
        """The loss of a micro-batch whose forwards are all done, and its gradient."""
        documents, call = self._documents[number], self.call
        whole = []
        for document in documents:
            pieces = self._outputs.pop(document)
            whole.append(torch.cat([pieces[start] for start in sorted(pieces)]))
        if self.training:
            whole = [outputs.requires_grad_() for outputs in whole]
        data: list[Any] = []
        batch = self.batches.item(number) if self.batches.readable else None
        loss, tokens = schedules.forward_step_calc_loss(
            self.model,
            whole,
            partial(self.attached.adapter.loss, batch),
            self.config,
            None,
            call.collect_non_loss_data,
            call.num_microbatches,
            data,
            self.cp_size,
            True,
        )
        self.batches.let_go(number)
        self.data[number] = data
        self.tokens = self.tokens + tokens
        if not self.training:
            return
        loss = scalar(loss, f"micro-batch {number}")
        if self.config.grad_scale_func is not None:
            loss = self.config.grad_scale_func(loss)
        gradients = torch.autograd.grad(loss, whole, allow_unused=True)
        for document, outputs, gradient in zip(documents, whole, gradients, strict=True):
            self._gradients[document] = torch.zeros_like(outputs) if gradient is None else gradient

    def _run_backward(self, op: Op, gradient: Tensor | None) -> Tensor | None:
        if not self.is_last:
            return super()._run_backward(op, gradient)
        _, output = self._saved[op.chunk]
        made, start = torch.zeros_like(output), 0
        for span in self.plan.chunks[op.chunk].spans:
            mine = self._gradients[span.document][span.start : span.stop]
            made[0, start : start + span.tokens] = mine
            start += span.tokens
            if span.start == 0:  # of a document's slices, the first one's backward comes last
                del self._gradients[span.document]
        return self._backward_from(op, made)

    def _backward_from(self, op: Op, gradient: Tensor) -> Tensor | None:
        """As ``_run_backward``, from the gradient of an output that still has its data."""
        received, output = self._saved.pop(op.chunk)
        noting = self._ready is not None and op == self._last_backward
        if self.config.timers is not None:
            self.config.timers("backward-compute", log_level=2).start()
        with (
            self._deferring(op.chunk),
            self._ready.noting() if self._ready is not None and noting else nullcontext(),
        ):
            torch.autograd.backward(output, gradient)
        if self.config.timers is not None:
            self.config.timers("backward-compute").stop()
        return None if received is None else received.grad

    def abandon(self) -> None:
        super().abandon()
        self._outputs.clear()
        self._gradients.clear()

    def in_callers_order(self) -> list[Any]:
        """Megatron's forward_data_store; nothing on stages before the last."""
        return [item for number in sorted(self.data) for item in self.data[number]]


def groups_of(plan: Plan, of_document: Sequence[int]) -> tuple[int, ...]:
    """The micro-batch of every chunk of ``plan``. PlanError: a chunk has tokens of two, or a
    backward comes before the loss that it follows from."""
    groups = []
    for number, chunk in enumerate(plan.chunks):
        found = {of_document[span.document] for span in chunk.spans}
        if len(found) > 1:
            raise PlanError(
                f"chunk {number} holds documents of micro-batches "
                f"{' and '.join(map(str, sorted(found)))}; expected one micro-batch in a chunk"
            )
        groups.append(found.pop())
    left = {group: groups.count(group) for group in set(groups)}
    for op in plan.orders[-1]:
        if op.kind is Kind.FORWARD:
            left[groups[op.chunk]] -= 1
        elif left[groups[op.chunk]]:
            raise PlanError(
                f"stage {plan.stages - 1} at {op}: the loss of micro-batch {groups[op.chunk]} "
                f"lacks {left[groups[op.chunk]]} forwards"
            )
    return tuple(groups)
