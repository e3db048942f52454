"""One stage of the model for the executor, with the computations of F, B, I, W, H and G."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
)
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.nn import Parameter

from megatron_epp.ir import BACKWARDS, MAKE_GRADIENTS, OFFLOAD, Kind, Op, Plan
from megatron_epp.layers.moe.router_stats import RouterStats
from megatron_epp.layers.recompute.offload import entrance
from megatron_epp.layers.wgrad.linear import DeferredWeightGrads
from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.mcore.kinds.moe.exchange import reserve_rows
from megatron_epp.mcore.kinds.moe.router import drop_routing, moe_layers, report, router_stats_for
from megatron_epp.mcore.lm_head.head import HiddenStates, ShardedHead
from megatron_epp.mcore.model.bucket_order import ReadyOrder
from megatron_epp.mcore.model.split_backward import Deferral, early_modules
from megatron_epp.runtime.host_store import HostStore
from megatron_epp.runtime.kv_store import Store

# External training loops read their own data; their Megatron may lack imports of our data package.
if TYPE_CHECKING:
    from megatron_epp.mcore.data.chunk_batches import ChunkBatch, ChunkBatchBuilder

# Megatron 0.16 requires this argument, which has no effect.
_MODEL_TYPE = {"model_type": None} if "model_type" in signature(backward_step).parameters else {}

# forward_step(iterator over one ChunkBatch, model) -> (output, loss_of). On the last stage,
# loss_of(output) returns (loss summed over tokens, number of tokens, report for the log).
type ForwardStep = Callable[[Iterator[ChunkBatch], Any], tuple[Tensor, Callable]]


class ModelStage:
    """Runner of the ops of one plan on a stage of Megatron's model, called by the executor.

    In the last op that computes gradients, DDP's hooks start the overlapped reduction. The loss is
    multiplied by the optimizer's loss scale. With ``fused_head``, the last stage's F also runs the
    LM head's backward. ``builder`` builds the inputs of the chunks, which ``forward_step`` passes
    to the model. ``store`` is the K/V cache of the stage. ``host`` stores tensors of offloaded
    layers (None: a new store). ``head`` runs H and G; None without vocabulary parallelism.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        forward_step: ForwardStep,
        builder: "ChunkBatchBuilder",
        plan: Plan,
        store: Store,
        fused_head: bool = False,
        host: HostStore | None = None,
        head: ShardedHead | None = None,
    ):
        self.model, self.config, self.forward_step = model, config, forward_step
        self.builder, self.store = builder, store
        self.stage = builder.stage
        self.is_last = self.stage == plan.stages - 1
        self.training = not plan.forward_only
        self.head_ops = head
        self._fused_head = fused_head and self.is_last and self.training and head is None
        self.host = HostStore(builder.device, None, model.parameters()) if host is None else host
        self.host.begin()
        self._recompute = plan.recompute[self.stage]
        self.tokens: Tensor | int = 0
        self.reports: list[dict[str, Tensor]] = []
        self._saved: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._loss_of: dict[int, Callable] = {}
        order = plan.orders[self.stage]
        forwards = [op.chunk for op in order if op.kind is Kind.FORWARD]
        self._following = dict(pairwise(forwards))
        self._last_gradients = last_op(order, MAKE_GRADIENTS)
        self._last_backward = last_op(order, BACKWARDS)
        self._no_sync = ExitStack()
        # With several stages on a rank (reduce_in_turn): the stages whose reductions wait for this
        # stage's reductions, and whether this stage's reductions wait for another stage's.
        self._after: list[ModelStage] = []
        self._waits, self.reduces = False, True  # False in a call that runs once more
        self._patched = ExitStack()
        self._deferred = {
            op.chunk: DeferredWeightGrads(self._set_aside) for op in order if op.kind is Kind.INPUT
        }
        besides = early_modules(model, self._fused_head)
        self._deferral = Deferral(model, besides) if self._deferred else None
        self._ready: ReadyOrder | None = None
        self._abandoned = False
        self._router_stats: RouterStats | None = None
        if self.training:
            samples, model = self._samples(plan), self.layers_model
            self._router_stats = router_stats_for(model, plan, self._loss_scale, *samples)

    @property
    def layers_model(self) -> Any:
        """Module with Megatron's layers; DDP may have wrapped it."""
        return self.model

    def _samples(self, plan: Plan) -> tuple[Sequence[int], Sequence[int]]:
        """Return the arguments ``ends`` and ``micro_batches`` of router_stats_for."""
        return self.builder.ends, ()

    def __enter__(self) -> "ModelStage":
        if self.training and self.config.no_sync_func is not None:
            self._no_sync.enter_context(self.config.no_sync_func())
            if self._hooks_reduce and self._last_gradients != self._last_backward:
                self._ready = ReadyOrder(self.model, self._report_ready, self._of_head)
        if self._deferral is not None:
            self._patched.enter_context(self._deferral)
        return self

    def __exit__(self, *error: Any) -> None:
        self._no_sync.close()
        self._patched.close()
        if self._abandoned and self.training and self.reduces:
            self._reduce_anyway()
        if self._router_stats is not None:
            drop_routing(self.layers_model)
            if error[0] is None and not self._abandoned:
                report(self._router_stats, self.layers_model)
        if error[0] is None and self.training:
            assert not self._saved, "a chunk's forward has no backward"
            assert not self._deferred, "a chunk's I has no W"
            assert not self.head_ops, "a chunk's H has no G"
            assert not len(self.host), "host memory holds layers of a chunk that no op fetches"
            # Megatron's overlapped reduction by hooks runs on the first stage only when gradient
            # reduction is aligned over the stages (schedules.py: grad_sync_func).
            if self.config.grad_sync_func is not None and self.stage > 0 and self.reduces:
                self.config.grad_sync_func(self.model.parameters())

    def abandon(self) -> None:
        """Free all tensors saved for later ops; the iteration's gradients are then invalid."""
        self._saved.clear()
        self._deferred.clear()
        self._loss_of.clear()
        if self.head_ops is not None:
            self.head_ops.clear()
        self.host.clear()
        self._ready = None
        self._abandoned = True

    def _reduce_anyway(self) -> None:
        """Start the reductions that abandoned ops did not start: other replicas wait for them."""
        groups = (
            *getattr(self.model, "bucket_groups", ()),
            *getattr(self.model, "expert_parallel_bucket_groups", ()),
        )
        for group in groups:
            group.per_param_grad_ready_counts = {}  # incomplete: later iterations must not use them
            overlaps = group.ddp_config.overlap_grad_reduce and self._hooks_reduce
            if overlaps and not group.is_first_batch and group.grad_reduce_handle is None:
                group.start_grad_sync(self.model.force_all_reduce)

    def forward(self, chunk: int, received: Tensor | None) -> Tensor | None:
        """Run F of ``chunk`` on the received hidden states; return the output to send, if any."""
        sent = self._forward(chunk, received)
        if (following := self._following.get(chunk)) is not None:
            self.builder.prepare(following)
        return sent

    def _forward(self, chunk: int, received: Tensor | None) -> Tensor | None:
        offloads = OFFLOAD in self._recompute[chunk] and self.training
        if received is None or not self.training:
            hidden = received
        elif self._recompute[chunk].startswith(OFFLOAD):
            received, hidden = entrance(received)
        else:
            hidden = received.requires_grad_()
        get_attr_wrapped_model(self.model, "set_input_tensor")([hidden])
        batch = self.builder.batch(chunk, self.store, self.training)
        batch.params.state.host = self.host if offloads else None
        batch.params.state.router_stats = self._router_stats
        if self._fused_head:
            assert batch.loss_mask is not None, "the last stage's"
            batch = replace(batch, known_gradient=self._loss_gradient(batch.loss_mask))
        with self._deferring(chunk):
            output, loss_of = self.forward_step(iter((batch,)), self.model)
        if offloads:
            self.host.wait()
        if self.head_ops is not None:
            assert batch.labels is not None and batch.loss_mask is not None
            weights_1T = self._loss_gradient(batch.loss_mask) if self.training else batch.loss_mask
            self.head_ops.learn(chunk, batch.labels, weights_1T)
        if self.is_last and self.head_ops is None:
            loss = self._report(loss_of, output)
            if self.training:
                self._saved[chunk] = received, loss
            return None
        if isinstance(output, HiddenStates):
            output, self._loss_of[chunk] = output.normed_t1H, loss_of
        sent = self._detached(chunk, received, output)
        if self.is_last and self.head_ops is not None:
            return self.head_ops.begin(chunk, sent)
        return sent

    def _detached(self, chunk: int, received: Tensor | None, output: Tensor) -> Tensor:
        """Return the data of ``output`` to send, and save its graph for the backward."""
        sent = output.detach()
        if self.training:
            self._saved[chunk] = received, output
            # Autograd needs the node but not the data; ``sent`` refers to the data until the send.
            deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)
        return sent

    def _report(self, loss_of: Callable, token_losses_1T: Tensor) -> Tensor:
        """Compute the chunk's loss, add it to the iteration's report, and return the loss."""
        loss, tokens, report = loss_of(token_losses_1T)
        self.tokens = self.tokens + tokens
        self.reports.append(report)
        return loss

    def head(self, chunk: int, received: Tensor) -> Tensor | None:
        """Run H of ``chunk`` on this rank's vocabulary rows; return the message to send, if any."""
        assert self.head_ops is not None, "a plan with H runs where its output layer is spread"
        with torch.no_grad():
            output = self.head_ops.head(chunk, received)
            if not self.is_last:
                return output
            self._report(self._loss_of.pop(chunk), output)
        return None

    def head_weight(self, chunk: int) -> None:
        """Run G of ``chunk``: add the weight gradient of this rank's vocabulary rows."""
        assert self.head_ops is not None, "a plan with G runs where its output layer is spread"
        with self._reducing(Op(Kind.HEAD_WEIGHT, chunk)) as ready:
            self.head_ops.weight_gradient(chunk)
            if ready is not None:
                ready.finish()

    def _loss_gradient(self, loss_mask_1T: Tensor) -> Tensor:
        """Return the gradient of every token's loss: the loss scale times the token's mask."""
        return loss_mask_1T * self._loss_scale(loss_mask_1T.device)

    def _loss_scale(self, device: torch.device) -> Tensor | float:
        """Return the optimizer's loss scale, for gradients computed outside of backward_step."""
        if self.config.grad_scale_func is None:
            return 1.0
        return self.config.grad_scale_func(torch.ones((), device=device))

    def backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        """Run B of ``chunk``; return the gradient to send, None on the first stage."""
        op = Op(Kind.BACKWARD, chunk)
        with self._reducing(op):
            return self._run_backward(op, gradient)

    def input_backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        """Run I of ``chunk``, deferring weight gradients; return the gradient to send, if any."""
        return self._run_backward(Op(Kind.INPUT, chunk), gradient)

    def weight_backward(self, chunk: int) -> None:
        """Run W of ``chunk``: compute and add its deferred weight gradients."""
        deferred = self._deferred.pop(chunk)
        with self._reducing(Op(Kind.WEIGHT, chunk)) as ready:
            if ready is not None:
                ready.finish(deferred)
            else:
                deferred.accumulate_all()

    def _run_backward(self, op: Op, gradient: Tensor | None) -> Tensor | None:
        received, output = self._saved.pop(op.chunk)
        if self.head_ops is not None:
            gradient = self.head_ops.gradient(op.chunk, gradient)
        self.host.prefetch(op.chunk)
        noting: AbstractContextManager = nullcontext()
        if self._ready is not None and op == self._last_backward:
            noting = self._ready.noting()
        # A recomputed forward also runs in this context, and defers as the first forward did.
        with self._deferring(op.chunk), noting:
            gradients = self._differentiate(op.chunk, received, output, gradient)
        return gradients if self.head_ops is None else self.head_ops.hand_back(op.chunk, gradients)

    def _differentiate(
        self, chunk: int, received: Tensor | None, output: Tensor, gradient: Tensor | None
    ) -> Tensor | None:
        """Run the backward of ``output``; return the gradient of ``received``."""
        return backward_step(
            input_tensor=received,
            output_tensor=output,
            output_tensor_grad=gradient,
            config=self.config,
            **_MODEL_TYPE,
        )

    def _deferring(self, chunk: int) -> AbstractContextManager:
        if self._deferral is None:
            return nullcontext()
        return self._deferral.into(self._deferred.get(chunk))

    def _set_aside(self, weight: Parameter) -> None:
        if self._ready is not None:
            self._ready.note(weight)

    @property
    def _hooks_reduce(self) -> bool:
        """Whether DDP's hooks start the reductions: if grad_sync_func is None, or on stage 0."""
        return self.config.grad_sync_func is None or self.stage == 0

    @contextmanager
    def _reducing(self, op: Op) -> Iterator[ReadyOrder | None]:
        """Enable DDP's hooks if this context runs the stage's last ``op`` that computes gradients.

        After that op, start the reductions of stages that wait for this stage. Yield the recorder
        whose order ``op`` must report to DDP, or None.
        """
        last, waits = op == self._last_gradients, self._waits
        if last and self._hooks_reduce and not waits:
            self._wake(self._reduces_early and op == self._last_backward)
        yield self._ready if last and not waits else None
        for other in self._after if last else ():
            other._wake()
            if other._ready is not None:
                other._ready.finish()

    def _wake(self, reports: bool = True) -> None:
        """Enable DDP's hooks; if ``reports``, also report the parameters in ``_of_head``."""
        self._no_sync.close()
        for weight in self._of_head if reports else ():
            self._report_ready(weight)

    @property
    def _reduces_early(self) -> bool:
        """Whether reductions overlap with ops."""
        return self.training and self.config.no_sync_func is not None and self._hooks_reduce

    def reduce_after(self, other: "ModelStage") -> None:
        """Delay this stage's reductions until stage ``other`` of this rank has started its own."""
        if not (self._reduces_early and other._reduces_early):
            return
        self._waits = True
        if self._ready is None:
            self._ready = ReadyOrder(self.model, self._report_ready, self._of_head)
        other._after.append(self)

    @property
    def _of_head(self) -> tuple[Parameter, ...]:
        """Parameters whose gradients only G computes."""
        weight = None if self.head_ops is None else self.head_ops.shard.weight
        return () if weight is None else (weight,)

    def _report_ready(self, parameter: Parameter) -> None:
        groups = self.model.param_to_bucket_group
        groups[parameter].register_grad_ready(parameter, self.model.force_all_reduce)


def reserve_exchange(stage: ModelStage, plans: Sequence[Plan], row_shard: RowShard) -> None:
    """Allocate HybridEP's buffers for the token dispatch of all chunks of ``plans``.

    The function also sets the number of rows of every chunk in the dispatchers of the stage's MoE
    layers. Without HybridEP, it does nothing.

    Args:
        stage: Stage with the MoE layers.
        plans: Plans of all replicas that run in lockstep, including this rank's plan.
        row_shard: This rank's shard of a chunk's rows.
    """
    reserve_rows([layer for _, layer in moe_layers(stage.layers_model)], plans, row_shard)


def reduce_in_turn(stages: Mapping[int, ModelStage], ran: Sequence[tuple[int, Op]]) -> None:
    """Make a rank's stages start their reductions in a fixed order, the model's last stage first.

    Replicas wait for each other in reductions, but their plans may finish the stages in different
    orders. ``ran`` lists the (stage, op) pairs of the rank in the order of execution.
    """
    ends = {stage: at for at, (stage, op) in enumerate(ran) if op.kind in MAKE_GRADIENTS}
    latest = max(stages)
    for stage in sorted(ends, reverse=True):
        if ends[stage] < ends[latest]:
            stages[stage].reduce_after(stages[latest])
        else:
            latest = stage


def last_op(order: tuple[Op, ...], kinds: tuple[Kind, ...]) -> Op | None:
    """Return the last op of ``order`` whose kind is in ``kinds``; None without such an op."""
    return next((op for op in reversed(order) if op.kind in kinds), None)


def sum_reports(reports: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return a list with one report, the sum of the chunks' reports; [] without reports."""
    if not reports:
        return []
    return [{key: torch.stack([r[key] for r in reports]).sum(0) for key in reports[0]}]
