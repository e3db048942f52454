"""Probe that runs modules of a stage on synthetic chunks and measures their seconds and bytes.

The probe runs the model's own modules with the executor's attention, K/V store and recompute, so it
measures the code that runs in training.
"""

import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_epp.cost.loads import pairs_within
from megatron_epp.ir import KEEP, Span
from megatron_epp.layers.chunk_state import ChunkState, Rows
from megatron_epp.layers.moe.weight_stack import stacks_of
from megatron_epp.layers.recompute.wrap import hidden_of
from megatron_epp.layers.wgrad.linear import DeferredWeightGrads
from megatron_epp.mcore.calibrate.clocks import Clock, DeviceClock, NoClock, WallClock
from megatron_epp.mcore.data.chunk_batches import ChunkBatch
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.mcore.kinds.modules import kinds_of_layer, timed_modules
from megatron_epp.mcore.kinds.mtp.mtp_layers import enter, layers_of, mtp_layers_of
from megatron_epp.mcore.model.rng import random_states, restore_random_states
from megatron_epp.mcore.model.split_backward import Deferral
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import AllocatorMeter, Meter, NoMeter, SavedBytesMeter

_CACHE_BYTES = 64 * 2**20  # more than the caches of a core

ForwardStep = Callable[[Iterator[Any], Any], tuple[Tensor, Callable]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A synthetic chunk: a slice, or a pack of documents.

    Attributes:
        tokens: Number of tokens in the chunk.
        context: Number of tokens before the slice in its document.
        pieces: Number of documents in the pack; ignored if the chunk is a slice (``context`` or
            ``cut``).
        cut: Whether another slice of the document follows, so that K and V are stored.
        local: Whether each document is computed by a single context-parallel rank; ``pieces`` is
            then a multiple of the number of context-parallel ranks.
    """

    tokens: int
    context: int = 0
    pieces: int = 1
    cut: bool = False
    local: bool = False

    @property
    def spans(self) -> tuple[Span, ...]:
        """Span of each document in the chunk."""
        if self.context or self.cut:
            return (Span(0, self.context, self.context + self.tokens),)
        sizes = [
            self.tokens // self.pieces + (k < self.tokens % self.pieces) for k in range(self.pieces)
        ]
        return tuple(Span(document, 0, size) for document, size in enumerate(sizes))

    @property
    def pairs(self) -> int:
        """Number of query-key pairs of causal attention without a sliding window."""
        return self.pairs_within(0)

    def pairs_within(self, window: int) -> int:
        """Return the number of query-key pairs, at most ``window`` keys per query; 0: no window."""
        return pairs_within(self.spans, window)

    @property
    def rows(self) -> tuple[Rows, ...]:
        """Rows of the chunk that hold each span."""
        rows, start = [], 0
        for span in self.spans:
            cut = self.cut or self.context > 0
            rows.append(Rows(start, start + span.tokens, span, cut, not self.cut))
            start += span.tokens
        return tuple(rows)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds and bytes of one forward and backward pass.

    On a CPU, bytes are the sizes of the tensors that autograd saves. On a GPU, bytes come from the
    allocator's statistics. Bytes that are not measured are 0. Seconds come from the probe's clock.

    Attributes:
        forward_seconds: Seconds of F.
        backward_seconds: Seconds of B (of I if the backward is split), including recompute.
        held_bytes: Bytes held from F to B, without stored K and V and their gradients.
        forward_bytes: Peak bytes during F, minus ``held_bytes``.
        backward_bytes: Peak bytes during B (during I if the backward is split), minus the bytes
            held at the start of the op and the growth of the K/V store. It may be negative.
        weight_seconds: Seconds of W; 0 if no weight gradient is deferred to W.
        weight_input_bytes: Bytes held from I to W; 0 if no weight gradient is deferred to W.
    """

    forward_seconds: float
    backward_seconds: float
    held_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    weight_seconds: float = 0.0
    weight_input_bytes: int = 0


class Probe:
    """Runner of single modules of ``model``, this stage's unwrapped model.

    ``row_shard`` selects the rows of a chunk on this rank. ``head_tokens`` is the block size of the
    fused LM head in tokens, or None without it. Positions restart at 0 after ``context`` tokens.
    ``forward_step`` runs the model on ``device``. Layers run from index 0 on; see :meth:`of_layer`.
    Gradients accumulate, as in training; the caller clears them.
    """

    def __init__(
        self,
        model: Any,
        forward_step: ForwardStep,
        row_shard: RowShard,
        device: torch.device,
        head_tokens: int | None,
        context: int,
    ):
        self.model, self.forward_step, self.context, self.at = model, forward_step, context, 0
        self.fused_head, self.head_tokens = head_tokens is not None, head_tokens or 0
        self.config = model.config
        self.device, self.row_shard = device, row_shard
        self._dtype = self.config.params_dtype
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cores = len(os.sched_getaffinity(0))
        self._has_core = device.type == "cpu" and torch.get_num_threads() == 1 and ranks <= cores
        self._others = torch.zeros(_CACHE_BYTES if device.type == "cpu" else 0, dtype=torch.uint8)
        self._random = torch.Generator(device).manual_seed(20250921)
        # Before timed ops, other data fill the CPU caches, as in training.
        self.clock: Clock = WallClock(self.now, lambda: self._others.add_(1))
        if device.type == "cuda":
            self.clock = DeviceClock(self.now)

    def of_layer(self, at: int) -> "Probe":
        """Return a copy of the probe that runs layers of the stage from index ``at`` on."""
        other = copy.copy(self)
        other.at = at
        return other

    def timed_by(self, clock: Clock) -> "Probe":
        """Return a copy of the probe that uses ``clock``."""
        other = copy.copy(self)
        other.clock = clock
        return other

    def after_work(self, shape: Shape, repeats: int = 1) -> "Probe":
        """Return a copy that times ops on a GPU as busy as in training.

        Before every op, the GPU runs a layer on a chunk of ``shape`` (``repeats`` times before F).
        Do not measure bytes with the copy. On a CPU, or without layers, return the probe itself.
        """
        if self.device.type == "cpu" or not layers_of(self.model):
            return self
        work = partial(self.timed_by(NoClock()).layers, shape, KEEP)
        return self.timed_by(DeviceClock(self.now, work, repeats))

    @property
    def layer(self) -> Any:
        """Megatron's module of the stage's layer ``at``, the first layer that the probe runs."""
        return layers_of(self.model)[self.at]

    @property
    def first(self) -> bool:
        """Whether the stage has the embedding."""
        return bool(self.model.pre_process)

    @property
    def last(self) -> bool:
        """Whether the stage has the LM head."""
        return bool(self.model.post_process)

    @property
    def computes_alone(self) -> bool:
        """Whether layers run without communication, and this rank has a CPU core for itself."""
        config = self.config
        sharing = config.tensor_model_parallel_size, config.context_parallel_size
        return self._has_core and {*sharing, config.expert_model_parallel_size} == {1}

    @property
    def stores_last_slice(self) -> bool:
        """Whether the layer also stores K and V for the last slice of a document."""
        return any(kind.kept_shapes(self.layer, 1).last for kind in kinds_of_layer(self.layer))

    @property
    def modules(self) -> Mapping[str, tuple[Any, ...]]:
        """Modules of the layer that selective recompute recomputes, by name."""
        return timed_modules(self.layer)

    def most_context(self, fraction: float) -> int:
        """Return the number of context tokens that fill ``fraction`` of the GPU's memory.

        A token takes K and V of one layer twice (store and kernel), and their gradients once.
        """
        total = torch.cuda.get_device_properties(self.device).total_memory
        channels = sum(map(math.prod, _kept_shapes(self.layer, 1)))
        gradient = torch.promote_types(self._dtype, torch.float32)
        return int(fraction * total) // (channels * (2 * self._dtype.itemsize + gradient.itemsize))

    # -------------------------------------------------------------- parts

    def layers(
        self, shape: Shape, modes: str, weigh: bool = False, split: bool = False
    ) -> Measurement:
        """Run ``len(modes)`` layers from index ``at`` on, and return the measurement.

        Args:
            shape: The chunk.
            modes: Recompute modes, one letter per layer.
            weigh: Whether to measure bytes.
            split: Whether to split the backward into I and W.
        """
        store, params = self._chunk(shape, modes)
        hidden = self._hidden(shape)
        rotary = self._rotary(params)
        every = layers_of(self.model)
        # The input projection of an MTP module counts with the module's first layer.
        entered = {depth.first: depth for depth in mtp_layers_of(self.model)}
        tokens = self._integers(shape.tokens)

        def forward() -> Tensor:
            x = hidden
            for index in range(self.at, self.at + len(modes)):
                if index in entered:
                    x = enter(entered[index], self.model, x, tokens[0], params.positions)
                output = every[index](
                    hidden_states=x,
                    attention_mask=None,
                    rotary_pos_emb=rotary,
                    packed_seq_params=params,
                )
                x = hidden_of(output)
            return x

        return self._pass(forward, store, weigh, split)

    def ends(self, shape: Shape, weigh: bool = False, split: bool = False) -> Measurement:
        """Measure embedding, LM head and loss, if the stage has them, without its layers."""
        store, params = self._chunk(shape, "")
        tokens = self._integers(shape.tokens)
        mask = torch.ones_like(tokens, dtype=torch.float32) if self.last else None
        batch = ChunkBatch(
            tokens=tokens if self.first else None,
            positions=params.positions[None],
            labels=tokens if self.last else None,
            loss_mask=mask,
            params=params,
            known_gradient=mask if self.fused_head else None,
        )
        received = None if self.first else self._hidden(shape)
        self.model.set_input_tensor([received])

        def forward() -> Tensor:
            with _without_layers(self.model.decoder):
                output, loss_of = self.forward_step(iter((batch,)), self.model)
                return loss_of(output)[0] if self.last else output

        return self._pass(forward, store, weigh, split)

    def embedding(self, shape: Shape, weigh: bool = False) -> Measurement:
        """Measure the embedding."""
        store, params = self._chunk(shape, "")
        tokens = self._integers(shape.tokens)
        positions = params.positions[None]
        return self._pass(lambda: self.model.embedding(tokens, positions), store, weigh)

    def module_seconds(self, shape: Shape, module: Callable[[Tensor], Any]) -> float:
        """Return the seconds of one forward of ``module``, a module of a layer."""
        hidden = self._hidden(shape)
        start = self.clock.start()
        module(hidden)
        return self.clock.seconds(start)

    def message(self, tokens: int) -> Tensor:
        """Return a random tensor with the shape of a message of ``tokens`` between stages."""
        return self._hidden(Shape(tokens)).detach()

    # -------------------------------------------------------------- how

    def _pass(
        self, forward: Callable[[], Tensor], store: Store, weigh: bool, split: bool = False
    ) -> Measurement:
        scale = self._scale(store, weigh)
        deferred = DeferredWeightGrads()
        with scale.watching():
            start = self.clock.start()  # may run layers, whose weight gradients nothing defers
            with self._deferring(deferred) if split else nullcontext():
                output = forward()
            forward_seconds = self.clock.seconds(start)
            held, forward_peak = scale.held(), scale.peak()
            gradient = torch.ones_like(output)
            self._answer(store)
            kept = scale.held()
            start = self.clock.start(rested=False)
            if output.requires_grad:  # the output of a frozen embedding does not
                output.backward(gradient)
            backward_seconds = self.clock.seconds(start)
            backward_peak, waiting = scale.peak(), scale.held()
            splits, weight_seconds = len(deferred) > 0, 0.0
            if splits:
                start = self.clock.start(rested=False)
                deferred.accumulate_all()
                weight_seconds = self.clock.seconds(start)
        return Measurement(
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            held_bytes=held,
            forward_bytes=forward_peak - held,
            backward_bytes=backward_peak - kept,
            weight_seconds=weight_seconds,
            weight_input_bytes=waiting if splits else 0,
        )

    @contextmanager
    def _deferring(self, deferred: DeferredWeightGrads) -> Iterator[None]:
        besides = (self.model.output_layer,) if self.last and self.fused_head else ()
        with Deferral(self.model, besides) as deferral, deferral.into(deferred):
            yield

    def _scale(self, store: Store, weigh: bool) -> "_Scale":
        if self.device.type == "cuda" and weigh:
            return _Scale(AllocatorMeter(every_op=True), store)
        # The tensors saved by autograd do not include those of the store.
        meter = SavedBytesMeter(self.model.parameters()) if weigh else NoMeter()
        return _Scale(meter, Store({}))

    def _answer(self, store: Store) -> None:
        """Add zeros to the gradients in ``store``, in place of the backward of a later slice."""
        for layer, document, key_CGD in store:
            kept = store.context(layer, document, len(key_CGD))
            store.add_window_gradient(layer, document, 0, *map(torch.zeros_like, kept))

    def _chunk(self, shape: Shape, modes: str) -> tuple[Store, ChunkParams]:
        """Return the K/V store and the parameters of a chunk, as in an iteration.

        The store contains random K and V for the context of the chunk.
        """
        # Reserve space for all tokens: some kernels read context and slice as one tensor.
        everything = shape.context + shape.tokens
        store = Store({0: everything if shape.cut else shape.context}, {0: everything})
        for layer in range(self.at, self.at + len(modes)):
            kept = _kept_shapes(layers_of(self.model)[layer], shape.context)
            if shape.context and kept:
                key, value = map(self._normal, kept)
                # An SSM state has one row per slice boundary: before and after this slice.
                rows = None if len(key) > 1 else len(key) + shape.cut
                store.append(layer, 0, 0, key, value, rows)
        rows = self.row_shard.padded(shape.tokens)
        modes = KEEP * self.at + modes
        if shape.local:
            local_rows = rows // self.row_shard.parts
            of_rank = tuple(part for part in shape.rows if part.stop <= local_rows)
            state = ChunkState(0, (), 0, modes, store)
            state.local = ChunkState(0, of_rank, local_rows, modes, store)
        else:
            state = ChunkState(0, shape.rows, rows, modes, store)
        positions = torch.zeros(rows, dtype=torch.int64)
        for part in shape.rows:
            counted = torch.arange(part.span.start, part.span.stop)
            positions[part.start : part.stop] = counted % self.context
        return store, ChunkParams.of(state, positions[self.row_shard.local(rows)].to(self.device))

    def _hidden(self, shape: Shape) -> Tensor:
        rows = self.row_shard.message(self.row_shard.padded(shape.tokens))
        return self._normal((rows, 1, self.config.hidden_size)).requires_grad_()

    def _normal(self, size: Sequence[int]) -> Tensor:
        where = self._random.device
        tensor = torch.randn(tuple(size), generator=self._random, dtype=torch.float32, device=where)
        return tensor.to(self.device, self._dtype)

    def _integers(self, tokens: int) -> Tensor:
        local = self.row_shard.local(self.row_shard.padded(tokens))
        rows = local.stop - local.start
        tensor = torch.randint(
            0,
            self.model.vocab_size,
            (1, rows),
            generator=self._random,
            device=self._random.device,
        )
        return tensor.to(self.device)

    def _rotary(self, params: ChunkParams) -> Tensor | None:
        rotary = getattr(self.model, "rotary_pos_emb", None)
        if rotary is None:
            return None
        table = rotary(rotary.get_rotary_seq_len(params), packed_seq=True)
        return table[0] if isinstance(table, tuple) else table

    def now(self) -> float:
        """Return the time in seconds, after the device has completed all earlier work.

        On a CPU, this is the thread's CPU time if torch uses one thread and every rank has a core.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            # Memory that other streams have used (DDP accumulates weight gradients on its own
            # stream) is released only at the next allocation.
            torch.empty(1, device=self.device)
        return time.thread_time() if self._has_core else time.perf_counter()


def _kept_shapes(layer: Any, context: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors that ``layer`` stores for ``context`` tokens."""
    kept = (kind.kept_shapes(layer, context) for kind in kinds_of_layer(layer))
    return tuple(shape for each in kept for shape in each.shapes)


@contextmanager
def _without_layers(decoder: Any) -> Iterator[None]:
    layers, decoder.layers = decoder.layers, torch.nn.ModuleList()
    try:
        yield
    finally:
        decoder.layers = layers


class _Scale:
    """Bytes that ``meter`` counts, minus the growth of the K/V ``store`` since construction."""

    def __init__(self, meter: Meter, store: Store):
        self.meter, self.store = meter, store
        self._began = self._stored = store.bytes

    def watching(self) -> AbstractContextManager:
        return self.meter.watch(self.store)

    def held(self) -> int:
        self._stored = self.store.bytes
        return self.meter.now - (self._stored - self._began)

    def peak(self) -> int:
        return self.meter.op_peak() - (max(self._stored, self.store.bytes) - self._began)


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Restore random states and gradients at the end of the context, even on errors.

    DDP's gradient buffers are zero at the end. The context disables DDP's gradient reduction and
    its forward pre-hooks. Each pre-hook completes the parameter all-gather of its bucket and starts
    the all-gather of the next bucket. If only some modules of a model ran, one all-gather would not
    complete, and an assertion in Megatron's start_param_sync would fail in the second iteration.
    """
    drawn = random_states()
    gradients = [parameter.grad for parameter in model.parameters()]
    hooked = bool(getattr(model, "remove_forward_pre_hook_handles", None))
    if hooked:
        model.disable_forward_pre_hook(param_sync=False)
    lent = _lend_main_grads(model)
    try:
        for parameter in model.parameters():
            parameter.grad = None
        with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
            yield
    finally:
        if hooked:
            model.enable_forward_pre_hook()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for parameter in lent:
            delattr(parameter, "main_grad")
        if hasattr(model, "zero_grad_buffer"):
            model.zero_grad_buffer()
        restore_random_states(drawn)


def _lend_main_grads(model: Any) -> list[torch.nn.Parameter]:
    """Add a ``main_grad`` to parameters that need but lack it, and return these parameters.

    DDP normally adds ``main_grad``, but ``python -m megatron_epp profile`` measures without DDP.
    """
    lent = [weight for stack in stacks_of(model) for weight in stack.lend_gradients()]
    if not any(getattr(m, "fuse_wgrad_accumulation", False) for m in model.modules()):
        return lent
    bare = [p for p in model.parameters() if p.requires_grad and not hasattr(p, "main_grad")]
    for parameter in bare:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return lent + bare
