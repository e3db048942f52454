"""Stage of a loop's model for the executor, with documents cut into slices.

On the last stage:

    F of a chunk                    saves the outputs of its tokens, without their graph
    after a micro-batch's last F    the loop's loss is computed once, on full documents
    B of a chunk                    starts from the gradient of the loss at the chunk's tokens
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, override

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.ir import Kind, Op, Plan, PlanError, slices_of
from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.layers.chunk_state import ChunkState, chunk_rows, store_for
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.mcore.loops.attached import AttachedModel
from megatron_epp.mcore.loops.call_arguments import LoopCall
from megatron_epp.mcore.loops.forward_steps import ForwardSteps
from megatron_epp.mcore.loops.microbatch_iterators import MicroBatches
from megatron_epp.mcore.model.attention import this_device
from megatron_epp.mcore.model.stage import ModelStage


class NoBatchBuilder:
    """Batch builder that reads no data, because the loop's forward step draws its own data."""

    def __init__(self, stage: int, device: torch.device):
        self.stage, self.device = stage, device

    def prepare(self, chunk: int) -> None:
        """Do nothing: no data is read ahead."""


class SliceStage(ModelStage):
    """Stage that runs slices of documents.

    ``plans`` are those of all replicas in lockstep; ``replica`` is the index of this rank's
    replica. ``forests[micro-batch]`` contains the documents with their shared prefixes; every node
    of a forest is a document of the plan. ``row_shard`` is this rank's shard of a chunk's rows over
    ``groups.cp``. ``data[micro-batch]`` contains the micro-batch's entries of Megatron's
    forward_data_store. If ``error`` is not None after the call, the gradients are invalid.
    """

    def __init__(
        self,
        call: LoopCall,
        batches: MicroBatches,
        plans: Sequence[Plan],
        replica: int,
        stage: int,
        groups: Any,
        attached: AttachedModel,
        forests: Sequence[PrefixForest],
        row_shard: RowShard,
    ):
        self._together, plan = plans, plans[replica]
        self._slices = slices_of(plan)
        self.call, self.plan, self.attached, self.forests = call, plan, attached, forests
        # The plan numbers the documents of the whole call; each is a node of a forest.
        of = [number for number, forest in enumerate(forests) for _ in forest.nodes]
        store = store_for(plan, self._slices, attached.stores_last_slice)
        builder: Any = NoBatchBuilder(stage, this_device())
        step = call.forward_step_func
        super().__init__(call.one_model, call.config, step, builder, plan, store)
        self.batches, self.groups, self.row_shard = batches, groups, row_shard
        self._partial = row_shard.parts > 1 and getattr(attached.adapter, "partial_loss", False)
        self.data: dict[int, list[Any]] = {}
        self._documents = [
            [d for d, other in enumerate(of) if other == number] for number in range(len(forests))
        ]
        self._group = groups_of(plan, of)
        self._left = [self._group.count(number) for number in range(len(forests))]
        self._outputs: dict[int, dict[int, Tensor]] = {}  # [document][start]
        self._gradients: dict[int, Tensor] = {}  # [document], of full documents' outputs
        rows = plan, forests, row_shard, groups.tp, len(plans) > 1
        self._steps = ForwardSteps(call, batches, attached, *rows)

    @property
    def error(self) -> Exception | None:
        """Error of the loop's own code, after which replicas in lockstep have gone on."""
        return self._steps.error

    @property
    @override
    def layers_model(self) -> Any:
        return self.attached.part

    @override
    def _samples(self, plan: Plan) -> tuple[Sequence[int], Sequence[int]]:
        firsts = accumulate((len(forest.nodes) for forest in self.forests), initial=0)
        ends = [n + last for n, of in zip(firsts, self.forests, strict=False) for last in of.last]
        return ends, [len(forest.last) for forest in self.forests]

    # -------------------------------------------------------------- forward

    def _forward(self, chunk: int, received: Tensor | None) -> Tensor | None:
        config, number = self.config, self._group[chunk]
        if received is not None and self.training:
            received.requires_grad_()
        if config.timers is not None:
            config.timers("forward-compute", log_level=2).start()
        if number is not None:
            self._left[number] -= 1
        later = number is not None and self._left[number] > 0  # a later chunk's F runs the loss
        self.attached.part.set_input_tensor(received)
        autocast: Any = nullcontext()
        if config.enable_autocast:
            autocast = torch.autocast("cuda", dtype=config.autocast_dtype)
        with autocast, self._deferring(chunk):
            output = self._steps.output(chunk, self._params(chunk), later)
        if not self.is_last:
            self._stop_timer()
            return self._detached(chunk, received, output)
        if self.error is None:
            with self._steps.going_on():
                self._keep(chunk, output)
                if later or number is None:
                    self._stop_timer()
                else:
                    self._loss(number)
        if self.training:
            output = output if self.error is None else self.attached.output
            self._saved[chunk] = received, output
        return None

    def _stop_timer(self) -> None:
        if self.config.timers is not None:
            self.config.timers("forward-compute").stop()

    def _params(self, chunk: int) -> ChunkParams:
        total = self.row_shard.rows(self.plan.chunks[chunk])
        rows = chunk_rows(self.plan, self._slices, chunk)
        state = ChunkState(
            chunk,
            rows,
            total,
            self.plan.recompute[self.stage][chunk],
            self.store,
            self.training,
            router_stats=self._router_stats,
            lockstep_tokens=max(plan.chunks[chunk].tokens for plan in self._together),
        )
        device = next(self.model.parameters()).device
        positions = torch.zeros(total, dtype=torch.int64)
        for part in rows:
            own = torch.arange(part.span.start, part.span.stop)
            positions[part.start : part.stop] = own + part.offset
        return ChunkParams.of(state, on_device(positions[self.row_shard.local(total)], device))

    # -------------------------------------------------------------- the loss

    def _keep(self, chunk: int, output: Any) -> None:
        total = self.row_shard.rows(self.plan.chunks[chunk])
        rows = total // self.row_shard.parts
        if not isinstance(output, Tensor) or output.dim() < 2 or output.shape[:2] != (1, rows):
            actual = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"the forward step's output for {self.plan.chunks[chunk]} is {actual}; expected a "
                f"tensor [1, {rows}, ...] with one entry for each of the chunk's tokens (its loss, "
                "log-probability, ...), from which the adapter's loss follows"
            )
        outputs, start = output.detach()[0], 0
        if self.row_shard.parts > 1:
            outputs = _of_all_ranks(outputs, self.groups.cp)
        for span in self.plan.chunks[chunk].spans:
            piece = outputs[start : start + span.tokens]
            self._outputs.setdefault(span.document, {})[span.start] = piece
            start += span.tokens

    def _loss(self, number: int) -> None:
        """Compute the loss of micro-batch ``number``, and its gradient, after the last F."""
        documents, call = self._documents[number], self.call
        outputs_of = []
        for document in documents:
            pieces = self._outputs.pop(document)
            outputs_of.append(torch.cat([pieces[start] for start in sorted(pieces)]))
        if self.training:
            outputs_of = [outputs.requires_grad_() for outputs in outputs_of]
        samples = samples_of(self.forests[number], outputs_of)
        data: list[Any] = []
        batch = self.batches.item(number) if self.batches.readable else None
        returned: list[Any] = []

        def loss_of(_: Tensor, **named: Any) -> Any:
            returned.append(self.attached.adapter.loss(batch, samples, **named))
            return returned[0]

        loss, tokens = schedules.forward_step_calc_loss(
            self.model,
            outputs_of[0],  # only its device is read
            loss_of,
            self.config,
            None,
            call.collect_non_loss_data,
            call.num_microbatches,
            data,
            self.row_shard.parts,
            True,
        )
        self.batches.let_go(number)
        self.data[number] = data
        # If every context-parallel rank computes the full loss, only one counts the tokens.
        if self._partial or self.row_shard.part == 0:
            self.tokens = self.tokens + tokens
        if not self.training:
            return
        loss = scalar(loss, f"micro-batch {number}")
        counted = len(returned[0]) == 3 and not self.config.calculate_per_token_loss
        if counted and not self._partial:
            # Megatron takes the mean of gradients over context-parallel ranks; here each rank has
            # the loss of all rows.
            loss = loss * self.row_shard.parts
        if self.config.grad_scale_func is not None:
            loss = self.config.grad_scale_func(loss)
        gradients = torch.autograd.grad(loss, outputs_of, allow_unused=True, materialize_grads=True)
        if self._partial:
            gradients = _of_all_parts(gradients, self.groups.cp)
        self._gradients.update(zip(documents, gradients, strict=True))

    def _run_backward(self, op: Op, gradient: Tensor | None) -> Tensor | None:
        return super()._run_backward(
            op, self._loss_gradients(op.chunk) if self.is_last else gradient
        )

    def _loss_gradients(self, chunk: int) -> Tensor:
        """Return the gradient of the loss at this rank's rows of the chunk."""
        _, output = self._saved[chunk]
        if self.error is not None:
            return torch.zeros_like(output)
        total = self.row_shard.rows(self.plan.chunks[chunk])
        gradients, start = output.new_zeros(1, total, *output.shape[2:]), 0
        for span in self.plan.chunks[chunk].spans:
            gradient_rows = self._gradients[span.document][span.start : span.stop]
            gradients[0, start : start + span.tokens] = gradient_rows
            start += span.tokens
            if span.start == 0:  # a document's first slice has its last backward
                del self._gradients[span.document]
        return gradients[:, self.row_shard.local(total)]

    def _differentiate(
        self, chunk: int, received: Tensor | None, output: Tensor, gradient: Tensor | None
    ) -> Tensor | None:
        if not self.is_last:
            input_gradient = super()._differentiate(chunk, received, output, gradient)
        else:  # the output still has its data, which Megatron's backward_step would refuse
            if self.config.timers is not None:
                self.config.timers("backward-compute", log_level=2).start()
            torch.autograd.backward(output, gradient)
            if self.config.timers is not None:
                self.config.timers("backward-compute").stop()
            input_gradient = None if received is None else received.grad
        if input_gradient is None and received is not None:
            input_gradient = torch.zeros_like(received)  # the model does not use its input
        if self._steps.front is not None:
            self._steps.front.backward(chunk)
        return input_gradient

    @override
    def abandon(self) -> None:
        super().abandon()
        self._outputs.clear()
        self._gradients.clear()
        if self._steps.front is not None:
            self._steps.front.clear()

    def in_callers_order(self) -> list[Any]:
        """Return the last stage's forward_data_store in the loop's order; [] on other stages."""
        return [item for number in sorted(self.data) for item in self.data[number]]


def _of_all_ranks(local: Tensor, group: Any) -> Tensor:
    """Return the tensors [t, ...] of all context-parallel ranks, concatenated."""
    gathered = local.new_empty(group.size() * len(local), *local.shape[1:])
    dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
    return gathered


def _of_all_parts(gradients: tuple[Tensor, ...], group: Any) -> tuple[Tensor, ...]:
    """Return the gradients [L, ...] of all documents, summed over CP ranks."""
    every = torch.cat(gradients)
    dist.all_reduce(every, group=group)
    return tuple(every.split([len(one) for one in gradients]))


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


def samples_of(forest: PrefixForest, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs [L, ...] of every document, concatenated from the outputs of its nodes.

    In the backward, autograd sums the gradients of a shared node over the documents that share it.

    Args:
        forest: Documents with their shared prefixes.
        outputs: Outputs [tokens, ...] of every node of the forest.
    """
    paths = map(forest.path, range(len(forest.last)))
    return [
        outputs[path[0]] if len(path) == 1 else torch.cat([outputs[node] for node in path])
        for path in paths
    ]


def groups_of(plan: Plan, of_document: Sequence[int]) -> tuple[int | None, ...]:
    """Return the number of the micro-batch of every chunk of ``plan``; None for an empty chunk.

    Args:
        plan: The plan.
        of_document: Number of the micro-batch of every document of the plan.

    Raises:
        PlanError: A chunk has tokens of two micro-batches, or the last stage runs a backward before
            all forwards of the chunk's micro-batch.
    """
    groups: list[int | None] = []
    for number, chunk in enumerate(plan.chunks):
        numbers = {of_document[span.document] for span in chunk.spans}
        if len(numbers) > 1:
            raise PlanError(
                f"chunk {number} holds documents of micro-batches "
                f"{' and '.join(map(str, sorted(numbers)))}; expected one micro-batch in a chunk"
            )
        groups.append(numbers.pop() if numbers else None)
    left = {group: groups.count(group) for group in set(groups)}
    for op in plan.orders[-1]:
        if groups[op.chunk] is None:
            continue
        if op.kind is Kind.FORWARD:
            left[groups[op.chunk]] -= 1
        elif left[groups[op.chunk]]:
            raise PlanError(
                f"stage {plan.stages - 1} at {op}: the loss of micro-batch {groups[op.chunk]} "
                f"lacks {left[groups[op.chunk]]} forwards"
            )
    return tuple(groups)
