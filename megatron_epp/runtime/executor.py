"""The executor: a loop over one rank's program, and a table from kind to function."""

import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.profiler import record_function

from megatron_epp.ir import (
    COMPUTE,
    HandOver,
    Kind,
    Message,
    Op,
    Payload,
    Post,
    Program,
    StageOp,
    Timed,
    Transfer,
)
from megatron_epp.runtime.clock import CudaClock, HostClock
from megatron_epp.runtime.kv_store import StageStores, Store
from megatron_epp.runtime.malloc_trim import HostHeap
from megatron_epp.runtime.memory_meter import Meter, free_cached_memory, out_of_memory
from megatron_epp.runtime.stage_peers import Peers

logger = logging.getLogger(__name__)

# How many ops the host issues ahead of the device. One is enough to keep it busy; with more, what
# has been sent is kept for longer, and memory and last words speak of ops that are far away.
LEAD_OPS = 2


class Compute(Protocol):
    """The model's side of the executor: a method for every kind of op.

    ``forward`` takes the previous stage's output (None on the first stage) and gives what to send
    on (None on the last stage); ``backward`` takes the next stage's gradient (None on the last)
    and gives the gradient of its input (None on the first). ``input_backward`` and
    ``weight_backward`` are the halves of ``backward``. Where the output layer lies over the stages,
    the last stage's ``forward`` gives what ``head`` of the first takes, ``head`` what that of the
    next stage takes (None on the last), and ``head_weight`` makes the weight's gradient.
    """

    def forward(self, chunk: int, received: Tensor | None) -> Tensor | None: ...

    def backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None: ...

    def input_backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None: ...

    def weight_backward(self, chunk: int) -> None: ...

    def head(self, chunk: int, received: Tensor) -> Tensor | None: ...

    def head_weight(self, chunk: int) -> None: ...

    def abandon(self) -> None:
        """Free everything that is kept for later ops: there will be none."""


class LinkEnds(Protocol):
    """Sender and receiver of messages: :class:`~megatron_epp.runtime.link.Links` in training."""

    sent: int
    received: int

    def post(self, message: Message) -> None: ...

    def receive(self, message: Message) -> Tensor: ...

    def send(self, message: Message, tensor: Tensor) -> None: ...

    def zeros(self, message: Message) -> Tensor: ...

    def oldest_sending(self) -> Message | None: ...

    def oldest_arriving(self) -> Message | None: ...

    def finish(self) -> None: ...


class OutOfMemory(RuntimeError):
    """One of the ranks that compute an op together has no memory for it: none can go on."""


class LinkLost(RuntimeError):
    """A message that cannot come or leave: which op of which iteration waited, and how long."""


class OutsidePhase(str):
    """A time that is not this package's: it takes as long as it takes."""

    __slots__ = ()


BEFORE = OutsidePhase("the first iteration")


@dataclass
class CurrentOp:
    """The op or phase that this rank is in; read when a link is lost, when nothing moves, or when
    the job is being killed.

    rank    of the pipeline
    what    an op or a transfer of the program, the name of a step that all ranks take together, or
            what happens :class:`OutsidePhase`
    links   of the program that runs, None between programs
    stage   of the op or the transfer, which is one of those that the rank computes; else None
    """

    rank: int
    iteration: int = 0
    what: Op | Transfer | str = BEFORE
    since: float = field(default_factory=time.monotonic)
    links: LinkEnds | None = None
    stage: int | None = None

    def enter(self, what: Op | Transfer | str, stage: int | None = None):
        self.what, self.stage, self.since = what, stage, time.monotonic()

    def __str__(self) -> str:
        verb = "was in" if isinstance(self.what, Op) else "waited for"
        seconds = time.monotonic() - self.since
        stage = "" if self.stage is None else f"stage {self.stage}, "
        return (
            f"pipeline rank {self.rank}, {stage}iteration {self.iteration}: {verb} {self.what} for "
            f"{seconds:.1f} s"
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """``op`` of ``stage`` ran out of memory on pipeline rank ``rank`` with ``held_bytes`` held; the
    ops after it did nothing."""

    op: Op
    stage: int
    rank: int
    held_bytes: int
    reason: str


class Executor:
    """Runs ``program`` once. Tensors wait in ``_inbox`` and ``_outbox`` between transfer and op;
    between stages of this rank they go from one to the other.

    ``compute`` is the model's side of the rank's stage, or of each of its stages by number.
    ``store``: what all of them keep.

    When an op runs out of memory the other ranks must not wait for this one: it frees all, takes
    every message that comes and sends zeros where it should send something, to the program's end.
    What became of it is in ``failure``; the iteration's gradients are worth nothing then.
    ``peers`` compute the same ops with this rank: all of them give up, at one op, or the job ends
    with an :class:`OutOfMemory`. ``heap`` is looked after between ops, on hosts without a GPU.
    """

    def __init__(
        self,
        program: Program,
        compute: Compute | Mapping[int, Compute],
        links: LinkEnds,
        store: Store | StageStores,
        clock: HostClock | CudaClock,
        meter: Meter,
        current_op: CurrentOp,
        peers: Peers | None = None,
        heap: HostHeap | None = None,
    ):
        self.peers, self.heap = peers, heap
        self.program, self.links, self.store = program, links, store
        self.clock, self.meter, self.current_op = clock, meter, current_op
        self._computes = compute if isinstance(compute, Mapping) else {}
        # Of the stage whose op runs, which the rank's only one is throughout.
        self.compute = next(iter(compute.values())) if isinstance(compute, Mapping) else compute
        self.stage = next(iter(self._computes), current_op.rank)
        # By stage, of the op or of the transfer's own end.
        self._inbox: dict[tuple[int, Payload, int], Tensor] = {}
        self._outbox: dict[tuple[int, Payload, int], Tensor] = {}
        self._carrying = _carrying(program)
        self.failure: Failure | None = None
        self._do: dict[Kind, Callable[[Any], object]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._input_backward,
            Kind.WEIGHT: self._weight_backward,
            Kind.HEAD: self._head,
            Kind.HEAD_WEIGHT: self._head_weight,
            Kind.SEND: self._send,
            Kind.RECEIVE: self._receive,
        }

    def run(self) -> tuple[Timed, ...]:
        """Execute every op of the program; returns their records.

        On return nothing is kept: the store and both boxes are empty, every message has left.
        """
        marks: list[tuple[int, Op | Transfer, Any, Any, int]] = []
        ends: deque = deque(maxlen=LEAD_OPS)  # of the last ops
        self.current_op.links = self.links
        if self.heap is not None:
            self.heap.begin()
        with self.meter.watch(self.store):
            for item in self.program:
                if isinstance(item, Post):
                    self._post(item)
                    continue
                if isinstance(item, HandOver):
                    self._hand_to_stage(item.message)
                    continue
                op = self._turn_to(item)
                self.current_op.enter(op, self.stage)
                if isinstance(op, Op) and len(ends) == LEAD_OPS:
                    # Safe at any place: what was issued so far needs nothing that was not (lower).
                    self.clock.wait(ends[0])
                start = self.clock.mark()
                with record_function(str(item)):
                    reason = self._run(op)
                if reason is not None and isinstance(op, Op):  # a transfer raises
                    self._give_up(op, reason)
                end = self.clock.mark()
                if isinstance(op, Op):
                    ends.append(end)
                marks.append((self.stage, op, start, end, self.meter.op_peak()))
                if self.heap is not None:
                    self.heap.settle()
            self._finish()
        self.current_op.links = None
        assert not self._inbox and not self._outbox, "a tensor was received or made for nobody"
        assert len(self.store) == 0, f"{len(self.store)} K/V buffers outlive the iteration"
        # Marks are of the clock that made them, which is one of two.
        seconds: Callable[[Any], float] = self.clock.seconds
        return tuple(Timed(at, op, seconds(a), seconds(b), peak) for at, op, a, b, peak in marks)

    def _turn_to(self, item: Op | StageOp | Transfer) -> Op | Transfer:
        """The op or transfer of ``item``, whose stage is the current one from now on."""
        if isinstance(item, StageOp):
            self.stage, self.compute = item.stage, self._computes[item.stage]
            return item.op
        if isinstance(item, Transfer):
            ends = item.message
            self.stage = ends.source if item.kind is Kind.SEND else ends.target
        return item

    def _run(self, op: Op | Transfer) -> str | None:
        """Run ``op``; why there was no memory for it, if there was none. The error goes with this
        frame, and the tensors with the error."""
        try:
            self._do[op.kind](op)
        except (MemoryError, RuntimeError) as error:
            if isinstance(op, Transfer) or not out_of_memory(error):
                raise
            return self._no_memory(str(op), error)
        return None if isinstance(op, Transfer) or self.failure is not None else self._over()

    def _no_memory(self, where: str, error: MemoryError | RuntimeError) -> str:
        """Why; an :class:`OutOfMemory` where this rank alone cannot go on."""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if self.peers is not None and not self.peers.all_failed(where):
            raise OutOfMemory(
                f"{self.current_op}: out of memory ({reason}) on one of the ranks that share its "
                "layers, or their experts; the others wait for it in there, so the iteration "
                "cannot be repeated: lower --epp-memory-budget-gib"
            ) from None
        return reason

    def _over(self) -> str | None:
        """Why the op that is done should not have been: this rank's limit, or a peer's."""
        reason = None
        try:
            self.meter.check()
        except MemoryError as error:
            reason = str(error)
        limited = self.meter.limit_bytes < math.inf
        if self.peers is not None and limited and self.peers.any(reason is not None):
            return reason or "on another rank of this stage"
        return reason

    def _give_up(self, op: Op, reason: str):
        held = min(self.meter.op_peak(), self.meter.limit_bytes)
        self.failure = Failure(op, self.stage, self.current_op.rank, int(held), reason)
        logger.warning("%s: out of memory (%s)", self.current_op, reason)
        for compute in self._computes.values() or (self.compute,):
            compute.abandon()
        self.store.clear()
        self._inbox.clear()
        self._outbox.clear()
        gc.collect()  # what was recomputed hangs in cycles until its backward
        # May wait for the device, posted receives included: as in ``run``, it will not in vain.
        free_cached_memory()
        for kind in COMPUTE:
            self._do[kind] = self._pretend

    def _pretend(self, op: Op):
        for payload in Payload:
            self._inbox.pop(self._at(payload, op.chunk), None)

    def _at(self, payload: Payload, chunk: int) -> tuple[int, Payload, int]:
        """Where a tensor of the current stage lies."""
        return self.stage, payload, chunk

    def _forward(self, op: Op):
        received = self._inbox.pop(self._at(Payload.ACTIVATION, op.chunk), None)
        self._hand_over(op, self.compute.forward(op.chunk, received))

    def _hand_over(self, op: Op, tensor: Tensor | None):
        if tensor is not None:
            payload = self._carrying.get(self.stage, {}).get(op)
            assert payload is not None, f"{op}: a tensor was received or made for nobody"
            self._outbox[self._at(payload, op.chunk)] = tensor

    def _hand_to_stage(self, message: Message):
        """Give one stage of this rank what the other has made."""
        payload, chunk = message.payload, message.chunk
        tensor = self._outbox.pop((message.source, payload, chunk), None)
        assert tensor is not None or self.failure is not None, f"{message}: nothing was made"
        if tensor is not None:
            self._inbox[message.target, payload, chunk] = tensor

    def _backward(self, op: Op):
        gradient = self._inbox.pop(self._at(Payload.GRADIENT, op.chunk), None)
        self._hand_over(op, self.compute.backward(op.chunk, gradient))

    def _input_backward(self, op: Op):
        gradient = self._inbox.pop(self._at(Payload.GRADIENT, op.chunk), None)
        self._hand_over(op, self.compute.input_backward(op.chunk, gradient))

    def _weight_backward(self, op: Op):
        self.compute.weight_backward(op.chunk)

    def _head(self, op: Op):
        received = self._inbox.pop(self._at(Payload.HEAD, op.chunk))
        self._hand_over(op, self.compute.head(op.chunk, received))

    def _head_weight(self, op: Op):
        self.compute.head_weight(op.chunk)

    def _post(self, op: Post):
        try:
            try:
                self.links.post(op.message)
                return
            except (MemoryError, RuntimeError) as error:
                if self.failure is not None or not out_of_memory(error):
                    raise
                reason = self._no_memory(str(op), error)
            # Outside of the handler: the error holds on to what it names.
            following = self._turn_to(self._next_op(op))
            assert isinstance(following, Op)
            self.current_op.enter(following, self.stage)
            self._give_up(following, reason)
            self.links.post(op.message)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, OutOfMemory):
                raise
            self.current_op.enter(Transfer(Kind.RECEIVE, op.message), op.message.target)
            raise self._lost(op.message, error) from error

    def _next_op(self, post: Post) -> Op | StageOp:
        """The op that the failure of ``post`` is put down to: the one that would have followed."""
        rest = self.program[self.program.index(post) :]
        return next(item for item in rest if isinstance(item, (Op, StageOp)))

    def _send(self, op: Transfer):
        message = op.message
        tensor = self._outbox.pop(self._at(message.payload, message.chunk), None)
        if tensor is None:
            assert self.failure is not None, f"{op}: nothing was made"
            tensor = self.links.zeros(message)
        try:
            self.links.send(message, tensor)
        except RuntimeError as error:
            raise self._lost(message, error) from error

    def _receive(self, op: Transfer):
        message = op.message
        try:
            self._inbox[self._at(message.payload, message.chunk)] = self.links.receive(message)
        except RuntimeError as error:
            raise self._lost(message, error) from error

    def _finish(self):
        """Wait for the last messages to leave."""
        try:
            message = self.links.oldest_sending()
            if message is not None:
                self.current_op.enter(Transfer(Kind.SEND, message), message.source)
            self.links.finish()
        except RuntimeError as error:
            raise self._lost(message, error) from error

    def _lost(self, message: Message | None, error: RuntimeError | MemoryError) -> LinkLost:
        reason = str(error).splitlines()[0]
        logger.error("%s; the link is lost: %s", self.current_op, reason)
        return LinkLost(f"{self.current_op}; the link is lost: {reason}")


def _carrying(program: Program) -> dict[int, dict[Op, Payload]]:
    """As what each op's tensor leaves, by stage: its message stands behind it."""
    carrying: dict[int, dict[Op, Payload]] = {}
    maker: Op | None = None
    for item in program:
        if isinstance(item, (Op, StageOp)):
            maker = item.op if isinstance(item, StageOp) else item
        elif isinstance(item, HandOver) or (isinstance(item, Transfer) and item.kind is Kind.SEND):
            message = item.message
            assert maker is not None and maker.chunk == message.chunk, f"{item} behind {maker}"
            carrying.setdefault(message.source, {})[maker] = message.payload
    return carrying
