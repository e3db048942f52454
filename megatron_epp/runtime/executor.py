"""The executor: a loop over one rank's program, with a table from op kind to method."""

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
from megatron_epp.ir.errors import first_line
from megatron_epp.runtime.clock import CudaClock, HostClock
from megatron_epp.runtime.kv_store import StageStores, Store
from megatron_epp.runtime.link import Links
from megatron_epp.runtime.malloc_trim import HostHeap
from megatron_epp.runtime.memory_meter import Meter, free_cached_memory, out_of_memory
from megatron_epp.runtime.stage_peers import Peers

logger = logging.getLogger(__name__)

# Number of ops that the host issues ahead of the device. One keeps the device busy. With more, sent
# tensors live longer, and memory records and error lines refer to distant ops.
LEAD_OPS = 2


class Compute(Protocol):
    """Interface of the model of a stage: one method per op kind.

    ``chunk`` is the number of the chunk. Tensors have the shapes that the ``shape`` function of
    :class:`.Links` returns for these messages. With vocabulary parallelism, the output of the last
    stage's ``forward`` goes to the first stage's ``head``. The output of each ``head`` goes to the
    ``head`` of the next stage.
    """

    def forward(self, chunk: int, received: Tensor | None) -> Tensor | None:
        """Run F of ``chunk``; ``received`` is its input from the previous stage, None on the first.

        Returns:
            The output to send; None on the last stage without vocabulary parallelism.
        """

    def backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        """Run B of ``chunk``; ``gradient`` is that of the output, None on the last stage.

        Returns:
            The gradient of the stage's input; None on the first stage.
        """

    def input_backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        """Run I, the half of B that computes the input's gradient; see :meth:`backward`."""

    def weight_backward(self, chunk: int) -> None:
        """Run W, the half of B that computes the weights' gradients."""

    def head(self, chunk: int, received: Tensor) -> Tensor | None:
        """Run H, the matmul with this stage's vocabulary rows; return the next stage's input."""

    def head_weight(self, chunk: int) -> None:
        """Run G: compute and add the weight gradient of this stage's vocabulary rows."""

    def abandon(self) -> None:
        """Free all tensors saved for later ops, because these ops will not run."""


class OutOfMemory(RuntimeError):
    """Error: a rank ran out of memory in an op that several ranks compute together."""


class LinkLost(RuntimeError):
    """Error: a message cannot be sent or received; the text names the op and the iteration."""


class OutsidePhase(str):
    """Name of a phase outside this package, such as a checkpoint, of unknown duration."""

    __slots__ = ()


BEFORE = OutsidePhase("the first iteration")


@dataclass
class CurrentOp:
    """Record of the op or phase that this rank is in, for error messages.

    Messages about a lost link, a rank without progress, or SIGTERM print this record.

    Attributes:
        rank: rank in the pipeline.
        iteration: number of the iteration.
        what: an op or a transfer of the program, the name of a phase in which all ranks take part,
            or an :class:`OutsidePhase`.
        since: ``time.monotonic()`` at the start of ``what``.
        links: links of the running program; None between programs.
        stage: this rank's stage that runs the op or the transfer; None outside of a program.
    """

    rank: int
    iteration: int = 0
    what: Op | Transfer | str = BEFORE
    since: float = field(default_factory=time.monotonic)
    links: Links | None = None
    stage: int | None = None

    def enter(self, what: Op | Transfer | str, stage: int | None = None):
        """Set the current op or phase, its stage and its start time."""
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
    """Record of an op that failed; all later ops computed nothing.

    Attributes:
        op: the op.
        stage: stage of the op.
        rank: pipeline rank of the op.
        held_bytes: peak of the bytes held for chunks in the op, at most the meter's limit.
        reason: first line of the error.
        error: the error; None if the op ran out of memory.
    """

    op: Op
    stage: int
    rank: int
    held_bytes: int
    reason: str
    error: Exception | None = None


class Executor:
    """Executor that runs ``program`` once.

    If an op runs out of memory, the other ranks must not block. The executor then frees everything,
    receives the remaining messages, and sends zeros instead of outputs until the program ends.
    ``failure`` describes the op; the gradients of the iteration are invalid. With ``catch_errors``,
    any error of an op has this effect.

    Args:
        program: ops and transfers of this rank.
        compute: the model of the rank's stage, or a mapping from stage number to model.
        links: links that send and receive the rank's messages.
        store: K/V caches of all stages of the rank.
        clock: clock of the rank's device.
        meter: meter of the bytes held.
        current_op: record that is updated with every op, for error messages.
        peers: ranks that compute the same ops; None if there are none. They all stop computing at
            the same op, or raise an :class:`OutOfMemory`.
        heap: heap that is trimmed between ops, on CPU-only hosts; None for no trim.
        catch_errors: whether this rank goes on with zeros after any error of an op, as it does
            when out of memory. All ranks of ``peers`` must then fail at the same op.

    Example::

        program = lower_rank(plan, rank)
        links = Links(groups, shape, dtype, device)
        clock = HostClock()
        clock.start()
        executor = Executor(program, compute, links, store, clock, NoMeter(), CurrentOp(rank))
        records = executor.run()
        if executor.failure is not None:
            ...  # the iteration is void: plan it again with less memory
    """

    def __init__(
        self,
        program: Program,
        compute: Compute | Mapping[int, Compute],
        links: Links,
        store: Store | StageStores,
        clock: HostClock | CudaClock,
        meter: Meter,
        current_op: CurrentOp,
        peers: Peers | None = None,
        heap: HostHeap | None = None,
        catch_errors: bool = False,
    ):
        self.peers, self.heap, self._catch_errors = peers, heap, catch_errors
        self.program, self.links, self.store = program, links, store
        self.clock, self.meter, self.current_op = clock, meter, current_op
        self._computes = compute if isinstance(compute, Mapping) else {}
        # The model and number of the current op's stage, which change if the rank has several.
        self.compute = next(iter(compute.values())) if isinstance(compute, Mapping) else compute
        self.stage = next(iter(self._computes), current_op.rank)
        # Received tensors until their op runs, and outputs until they are sent. Keys: stage of the
        # op, or this rank's stage of the transfer; payload; chunk.
        self._inbox: dict[tuple[int, Payload, int], Tensor] = {}
        self._outbox: dict[tuple[int, Payload, int], Tensor] = {}
        self._carrying = _carrying(program)
        self.failure: Failure | None = None
        self._do: dict[Kind, Callable[[Any], object]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._input_backward,
            Kind.WEIGHT: lambda op: self.compute.weight_backward(op.chunk),
            Kind.HEAD: self._head,
            Kind.HEAD_WEIGHT: lambda op: self.compute.head_weight(op.chunk),
            Kind.SEND: self._send,
            Kind.RECEIVE: self._receive,
        }

    def run(self) -> tuple[Timed, ...]:
        """Execute every op and transfer of the program and return their records.

        On return the store is empty, and all messages have been sent. If an op failed,
        :attr:`failure` is set.

        Raises:
            LinkLost: if a message cannot be sent or received.
            OutOfMemory: if this rank is out of memory and its peers did not fail at the same op.
            Exception: any other error of an op, unless ``catch_errors`` is set.
        """
        marks: list[tuple[int, Op | Transfer, Any, Any, int]] = []
        ends: deque = deque(maxlen=LEAD_OPS)  # end marks of the last LEAD_OPS ops
        self.current_op.links = self.links
        if self.heap is not None:
            self.heap.begin()
        with self.meter.watch(self.store):
            for item in self.program:
                # 1. POST: start a receive.
                if isinstance(item, Post):
                    self._post(item)
                    continue
                # 2. HAND: give a tensor to another stage of this rank.
                if isinstance(item, HandOver):
                    self._hand_to_stage(item.message)
                    continue
                # 3. Select the stage of the op or transfer, and note it for error lines.
                op = self._turn_to(item)
                self.current_op.enter(op, self.stage)
                # 4. Let the host run at most LEAD_OPS ops ahead of the device. This cannot
                # deadlock: issued ops depend on issued ops and messages only (ir.program.lower).
                if isinstance(op, Op) and len(ends) == LEAD_OPS:
                    self.clock.wait(ends[0])
                # 5. Run the op, SEND or RECEIVE between two marks of the clock.
                start = self.clock.mark()
                with record_function(str(item)):
                    failed = self._run(op)
                # 6. After a failure: free everything, and turn the remaining ops into no-ops.
                if failed is not None and isinstance(op, Op):  # a transfer raises an error instead
                    self._give_up(op, failed)
                # 7. Record times and, for ops, the memory peak; to read it takes the host a while.
                end, peak = self.clock.mark(), 0
                if isinstance(op, Op):
                    ends.append(end)
                    peak = self.meter.op_peak()
                marks.append((self.stage, op, start, end, peak))
                # 8. Trim the heap (CPU-only hosts).
                if self.heap is not None:
                    self.heap.settle()
            # 9. Wait until the last messages have left.
            self._finish()
        self.current_op.links = None
        # 10. Check that no tensor is left over, and read the clock.
        assert not self._inbox and not self._outbox, "no op uses a received or computed tensor"
        assert len(self.store) == 0, f"{len(self.store)} K/V buffers outlive the iteration"
        # The type checker does not know which of the two clocks made the marks.
        seconds: Callable[[Any], float] = self.clock.seconds
        return tuple(Timed(at, op, seconds(a), seconds(b), peak) for at, op, a, b, peak in marks)

    def _turn_to(self, item: Op | StageOp | Transfer) -> Op | Transfer:
        """Make the stage of ``item`` the current stage, and return the op or transfer."""
        if isinstance(item, StageOp):
            self.stage, self.compute = item.stage, self._computes[item.stage]
            return item.op
        if isinstance(item, Transfer):
            ends = item.message
            self.stage = ends.source if item.kind is Kind.SEND else ends.target
        return item

    def _run(self, op: Op | Transfer) -> str | Exception | None:
        """Run ``op``; return the reason if it ran out of memory, its error to catch, or None.

        The reason is a text, because an error would keep its frames and their tensors in memory.
        """
        try:
            self._do[op.kind](op)
        except Exception as error:
            if isinstance(op, Transfer):
                raise
            if out_of_memory(error):
                return self._no_memory(str(op), error)
            if not self._catch_errors:
                raise
            return error
        return None if isinstance(op, Transfer) or self.failure is not None else self._over()

    def _no_memory(self, where: str, error: Exception) -> str:
        """Return the first line of ``error`` if all peers fail in the op ``where``, too.

        Raises:
            OutOfMemory: if a peer did not fail in this op.
        """
        reason = first_line(error)
        if self.peers is not None and not self.peers.all_failed(where):
            raise OutOfMemory(
                f"{self.current_op}: out of memory ({reason}) on one of the ranks that share its "
                "layers, or their experts; the others wait for it in there, so the iteration "
                "cannot be repeated: lower --epp-memory-budget-gib"
            ) from None
        return reason

    def _over(self) -> str | None:
        """Return the reason if this rank or a peer exceeded its memory limit in the op, or None."""
        reason = None
        try:
            self.meter.check()
        except MemoryError as error:
            reason = str(error)
        limited = self.meter.limit_bytes < math.inf
        if self.peers is not None and limited and self.peers.any(reason is not None):
            return reason or "on another rank of this stage"
        return reason

    def _give_up(self, op: Op, failed: str | Exception):
        """Free everything and turn later ops into no-ops, after an error or a lack of memory."""
        error = failed if isinstance(failed, Exception) else None
        reason = failed if isinstance(failed, str) else first_line(failed)
        held = min(self.meter.op_peak(), self.meter.limit_bytes)
        self.failure = Failure(op, self.stage, self.current_op.rank, int(held), reason, error)
        what = "out of memory" if error is None else f"failed with {type(error).__name__}"
        logger.warning("%s: %s (%s)", self.current_op, what, reason)
        for compute in self._computes.values() or (self.compute,):
            compute.abandon()
        self.store.clear()
        self._inbox.clear()
        self._outbox.clear()
        gc.collect()  # recomputed tensors hang in reference cycles until their backward
        # This may wait for the device and for posted receives; as in ``run``, it cannot deadlock.
        free_cached_memory()
        for kind in COMPUTE:
            self._do[kind] = self._pretend

    def _pretend(self, op: Op):
        for payload in Payload:
            self._inbox.pop(self._at(payload, op.chunk), None)

    def _at(self, payload: Payload, chunk: int) -> tuple[int, Payload, int]:
        """Return the key of a tensor of the current stage in the inbox or outbox."""
        return self.stage, payload, chunk

    def _forward(self, op: Op):
        received = self._inbox.pop(self._at(Payload.ACTIVATION, op.chunk), None)
        self._hand_over(op, self.compute.forward(op.chunk, received))

    def _hand_over(self, op: Op, tensor: Tensor | None):
        if tensor is not None:
            payload = self._carrying.get(self.stage, {}).get(op)
            assert payload is not None, f"{op}: no op uses a received or computed tensor"
            self._outbox[self._at(payload, op.chunk)] = tensor

    def _hand_to_stage(self, message: Message):
        """Move a tensor from one stage of this rank to another."""
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

    def _head(self, op: Op):
        received = self._inbox.pop(self._at(Payload.HEAD, op.chunk))
        self._hand_over(op, self.compute.head(op.chunk, received))

    def _post(self, op: Post):
        try:
            try:
                self.links.post(op.message)
                return
            except (MemoryError, RuntimeError) as error:
                if self.failure is not None or not out_of_memory(error):
                    raise
                reason = self._no_memory(str(op), error)
            # Outside the except block: the error references the frames' tensors.
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
        """Return the op after ``post``, to which a failure of ``post`` is attributed."""
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
        """Wait until the last messages have been sent."""
        try:
            message = self.links.oldest_sending()
            if message is not None:
                self.current_op.enter(Transfer(Kind.SEND, message), message.source)
            self.links.finish()
        except RuntimeError as error:
            raise self._lost(message, error) from error

    def _lost(self, message: Message | None, error: RuntimeError | MemoryError) -> LinkLost:
        reason = first_line(error)
        logger.error("%s; the link is lost: %s", self.current_op, reason)
        return LinkLost(f"{self.current_op}; the link is lost: {reason}")


def _carrying(program: Program) -> dict[int, dict[Op, Payload]]:
    """Return the payload of each op's output tensor, by stage.

    In the program, the SEND or HAND of an output follows the op that produces the output.
    """
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
