"""Parts of a stage, run alone on made-up chunks: what a measured profile is made from.

The parts are the model's own modules and go through the executor's own attention, store and
recompute, so what is measured is what training runs. T tokens of the chunk, P of context.
"""

import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_epp.cost.loads import pairs_within
from megatron_epp.ir import KEEP, Span
from megatron_epp.layers.chunk_state import ChunkState, Rows
from megatron_epp.layers.recompute.wrap import hidden_of
from megatron_epp.layers.wgrad.linear import DeferredWeightGrads
from megatron_epp.mcore.calibrate.clocks import Clock, DeviceClock, WallClock
from megatron_epp.mcore.data.chunk_batches import ChunkBatch
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.mcore.kinds.modules import kinds_of_layer, timed_modules
from megatron_epp.mcore.kinds.mtp.mtp_layers import enter, layers_of, mtp_layers_of
from megatron_epp.mcore.model.rng import random_states, restore_random_states
from megatron_epp.mcore.model.split_backward import Deferral
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import AllocatorMeter, Meter, NoMeter, SavedBytesMeter

_CACHE_BYTES = 64 * 2**20  # more than a core has of its caches

ForwardStep = Callable[[Iterator[Any], Any], tuple[Tensor, Callable]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A made-up chunk: a slice of ``tokens`` behind ``context`` tokens of its document, or,
    without context, ``pieces`` whole documents of together ``tokens``.

    ``cut``: more of the document follows, so K and V are kept. ``local``: every context-parallel
    rank computes its share of the pieces alone; their number is a multiple of the ranks'.
    """

    tokens: int
    context: int = 0
    pieces: int = 1
    cut: bool = False
    local: bool = False

    @property
    def spans(self) -> tuple[Span, ...]:
        if self.context or self.cut:
            return (Span(0, self.context, self.context + self.tokens),)
        sizes = [
            self.tokens // self.pieces + (k < self.tokens % self.pieces) for k in range(self.pieces)
        ]
        return tuple(Span(document, 0, size) for document, size in enumerate(sizes))

    @property
    def pairs(self) -> int:
        return self.pairs_within(0)

    def pairs_within(self, window: int) -> int:
        """Where a query sees at most ``window`` keys; 0: all before it."""
        return pairs_within(self.spans, window)

    @property
    def rows(self) -> tuple[Rows, ...]:
        rows, start = [], 0
        for span in self.spans:
            cut = self.cut or self.context > 0
            rows.append(Rows(start, start + span.tokens, span, cut, not self.cut))
            start += span.tokens
        return tuple(rows)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One pass forward and back.

    forward_seconds, backward_seconds   backward with the recompute that was asked for
    held_bytes                          from F to B; kept K and V and their gradients apart
    forward_bytes, backward_bytes       the most beyond that while F ran, and B; the latter is
                                        below 0 where B frees more than it makes
                                        (seconds by the probe's clock: on a GPU the device's own,
                                        whatever its host takes to issue the pass)
    weight_seconds                      of W, where backward was split: ``backward_*`` is then I's
    weight_input_bytes                  from I to W

    Bytes are what autograd saved on a CPU, the allocator's figures on a GPU, and 0 where nobody
    asked for them.
    """

    forward_seconds: float
    backward_seconds: float
    held_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    weight_seconds: float = 0.0
    weight_input_bytes: int = 0


class Probe:
    """Runs parts of ``model``, this stage's unwrapped GPTModel.

    ``row_shard`` is this rank's share of a chunk's rows; ``context`` how long the model's tables of
    positions are: those of a longer chunk start anew. Gradients of parameters add up as in
    training; whoever probes clears them. ``clock``: what seconds are measured by.
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
        self.model, self.forward_step, self.context = model, forward_step, context
        self.at = 0
        self.fused_head, self.head_tokens = head_tokens is not None, head_tokens or 0
        self.config = model.config
        self.device, self.row_shard = device, row_shard
        self._dtype = self.config.params_dtype
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cores = len(os.sched_getaffinity(0))
        self._has_core = device.type == "cpu" and torch.get_num_threads() == 1 and ranks <= cores
        self._others = torch.zeros(_CACHE_BYTES if device.type == "cpu" else 0, dtype=torch.uint8)
        self._random = torch.Generator(device).manual_seed(20250921)
        self.clock: Clock = WallClock(self.now, self._fill_caches)
        if device.type == "cuda":
            self.clock = DeviceClock(self.now)

    def of_layer(self, at: int) -> "Probe":
        """The same, but :meth:`layers` begins with the stage's layer of that number."""
        other = copy.copy(self)
        other.at = at
        return other

    def timed_by(self, clock: Clock) -> "Probe":
        """The same, but seconds are those of ``clock``."""
        other = copy.copy(self)
        other.clock = clock
        return other

    @property
    def layer(self) -> Any:
        """The module of the first layer that runs."""
        return layers_of(self.model)[self.at]

    @property
    def first(self) -> bool:
        return bool(self.model.pre_process)

    @property
    def last(self) -> bool:
        return bool(self.model.post_process)

    @property
    def computes_alone(self) -> bool:
        """Whether layers run on a core of their own, and exchange nothing with other ranks."""
        config = self.config
        sharing = config.tensor_model_parallel_size, config.context_parallel_size
        return self._has_core and {*sharing, config.expert_model_parallel_size} == {1}

    @property
    def stores_last_slice(self) -> bool:
        """Whether the layer has the store keep what last slices carry, too."""
        return any(kind.kept_shapes(self.layer, 1).last for kind in kinds_of_layer(self.layer))

    @property
    def modules(self) -> Mapping[str, tuple[Any, ...]]:
        """The layer's modules that selective recompute runs again."""
        return timed_modules(self.layer)

    def most_context(self, fraction: float) -> int:
        """Tokens of a context whose K and V in one layer, with their gradients as the store and as
        a kernel has them, take ``fraction`` of the GPU's memory."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        channels = sum(map(math.prod, _kept_shapes(self.layer, 1)))
        gradient = torch.promote_types(self._dtype, torch.float32)
        return int(fraction * total) // (channels * (2 * self._dtype.itemsize + gradient.itemsize))

    # -------------------------------------------------------------- parts

    def layers(
        self, shape: Shape, modes: str, weigh: bool = False, split: bool = False
    ) -> Measurement:
        """``len(letters)`` layers of the stage from the first on; a letter each. ``split``: I and
        W."""
        store, params = self._chunk(shape, modes)
        hidden = self._hidden(shape)
        rotary = self._rotary(params)
        every = layers_of(self.model)
        # What comes in front of a depth's first layer counts with it.
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
        """The stage without its layers: embedding, output layer and loss, whichever it has."""
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
            output, loss_of = self.forward_step(iter((batch,)), self.model)
            return loss_of(output)[0] if self.last else output

        with self._without_layers():
            return self._pass(forward, store, weigh, split)

    def embedding(self, shape: Shape, weigh: bool = False) -> Measurement:
        store, params = self._chunk(shape, "")
        tokens = self._integers(shape.tokens)
        positions = params.positions[None]
        return self._pass(lambda: self.model.embedding(tokens, positions), store, weigh)

    def module_seconds(self, shape: Shape, module: Callable[[Tensor], Any]) -> float:
        """Forward alone of one of a layer's modules."""
        hidden = self._hidden(shape)
        start = self.clock.start()
        module(hidden)
        return self.clock.seconds(start)

    def message(self, tokens: int) -> Tensor:
        """As stages hand each other."""
        return self._hidden(Shape(tokens)).detach()

    # -------------------------------------------------------------- how

    def _pass(
        self, forward: Callable[[], Tensor], store: Store, weigh: bool, split: bool = False
    ) -> Measurement:
        scale = self._scale(store, weigh)
        deferred = DeferredWeightGrads()
        with scale.watching(), self._deferring(deferred) if split else nullcontext():
            start = self.clock.start()
            output = forward()
            forward_seconds = self.clock.seconds(start)
            held, forward_peak = scale.held(), scale.peak()
            gradient = torch.ones_like(output)
            self._answer(store)
            kept = scale.held()
            start = self.clock.start()
            if output.requires_grad:  # a frozen embedding's does not
                output.backward(gradient)
            backward_seconds = self.clock.seconds(start)
            backward_peak, waiting = scale.peak(), scale.held()
            start = self.clock.start()
            deferred.accumulate_all()
            weight_seconds = self.clock.seconds(start)
        return Measurement(
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            held_bytes=held,
            forward_bytes=forward_peak - held,
            backward_bytes=backward_peak - kept,
            weight_seconds=weight_seconds if split else 0.0,
            weight_input_bytes=waiting if split else 0,
        )

    def _fill_caches(self):
        """With what other layers and chunks read: a core's own no longer have what comes."""
        if self.device.type == "cpu":
            self._others.add_(1)

    @contextmanager
    def _deferring(self, deferred: DeferredWeightGrads) -> Iterator[None]:
        besides = (self.model.output_layer,) if self.last and self.fused_head else ()
        with Deferral(self.model, besides) as deferral, deferral.into(deferred):
            yield

    def _scale(self, store: Store, weigh: bool) -> "_Scale":
        if self.device.type == "cuda" and weigh:
            return _Scale(AllocatorMeter(every_op=True), store)
        # What autograd saves has nothing of the store's to begin with.
        meter = SavedBytesMeter(self.model.parameters()) if weigh else NoMeter()
        return _Scale(meter, Store({}))

    def _answer(self, store: Store) -> None:
        """Leave in ``store`` what a later slice's backward leaves for one that is not the last."""
        for layer, document, key_CGD in store:
            kept = store.context(layer, document, len(key_CGD))
            store.add_window_gradient(layer, document, 0, *map(torch.zeros_like, kept))

    def _chunk(self, shape: Shape, modes: str) -> tuple[Store, ChunkParams]:
        """A chunk in the middle of its iteration: the K and V before it are kept, and gradients
        from a later slice lie ready."""
        # Room for all of it: some kernels read the last slice's K and V behind its context's.
        everything = shape.context + shape.tokens
        store = Store({0: everything if shape.cut else shape.context}, {0: everything})
        for layer in range(self.at, self.at + len(modes)):
            kept = _kept_shapes(layers_of(self.model)[layer], shape.context)
            if shape.context and kept:
                key, value = map(self._normal, kept)
                # A state is one row at each border: here, and behind the slice.
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

    @contextmanager
    def _without_layers(self) -> Iterator[None]:
        decoder = self.model.decoder
        layers, decoder.layers = decoder.layers, torch.nn.ModuleList()
        try:
            yield
        finally:
            decoder.layers = layers

    def now(self) -> float:
        """Seconds, when everything asked of the device so far is done.

        On a host, seconds that this thread had a core to itself where it does all the work and
        every rank has a core: what else runs there now will not run there later.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            # The allocator learns only when it is asked for memory that other streams are done with
            # what was freed: gradients of weights, which DDP adds up on a stream of its own.
            torch.empty(1, device=self.device)
        return time.thread_time() if self._has_core else time.perf_counter()


def _kept_shapes(layer: Any, context: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of what earlier slices, of ``context`` inputs, leave to ``layer``."""
    kept = (kind.kept_shapes(layer, context) for kind in kinds_of_layer(layer))
    return tuple(shape for each in kept for shape in each.shapes)


class _Scale:
    """Bytes by ``meter``; those of ``store``, which grow in F and shrink in B, stay out."""

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
    """Random states, gradients and what DDP has under way are afterwards what they were, also where
    the probe failed: no trace of what was probed.

    DDP's forward pre-hooks are off meanwhile. Each finishes its bucket's overlapped parameter
    gather and dispatches the next bucket's; of a model that runs in parts one would stay in flight,
    and in the second iteration Megatron asserts that none is (param_and_grad_buffer.py,
    start_param_sync).
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
    """The parameters that have a ``main_grad`` from here on: where linears add their gradients to
    it and no DDP has made any, as in the command that measures without training."""
    if not any(getattr(m, "fuse_wgrad_accumulation", False) for m in model.modules()):
        return []
    bare = [p for p in model.parameters() if p.requires_grad and not hasattr(p, "main_grad")]
    for parameter in bare:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return bare
