"""Guard of a stage: after a failure it sends zeros until the end, so that no other rank blocks."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_epp.ir import Kind, Op
from megatron_epp.mcore.loops.replica.redone_call import MisreadCall, ShapeVote, WrongShape
from megatron_epp.runtime.executor import Compute
from megatron_epp.runtime.kv_store import Store


class FailureGuard:
    """Wrapper of ``compute`` that handles exceptions of the loop's forward step or loss.

    After an exception it computes nothing, but still sends every message of the plan, filled with
    zeros. ``error`` is the exception; the gradients are then invalid. Ranks that share the layers
    of the stage must fail together, or they wait for this one inside a layer. ``compute`` may
    itself be the error of a stage that could not begin. ``last_op``, the stage's last one that adds
    gradients, waits for the ``vote`` on the replica's shapes.
    """

    def __init__(
        self,
        compute: Compute | Exception,
        store: Store,
        zeros: Callable[[int], Tensor],
        first: bool,
        last: bool,
        vote: ShapeVote | None = None,
        last_op: Op | None = None,
    ):
        self._store, self._zeros = store, zeros
        self._first, self._last = first, last
        self._vote, self._last_op = vote, last_op
        self.error = compute if isinstance(compute, Exception) else None
        self._begun = None if isinstance(compute, Exception) else compute

    @property
    def _compute(self) -> Compute:
        assert self._begun is not None, "a stage that could not begin computes nothing"
        return self._begun

    def forward(self, chunk: int, received: Tensor | None) -> Tensor | None:
        """Run F and count it for the vote; return what the stage sends."""
        sent = self._do(
            lambda: self._compute.forward(chunk, received), None if self._last else chunk
        )
        if self._vote is not None:
            self._vote.forward_done()
        return sent

    def backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        """Run B after the vote; return what the stage sends."""
        self._hear(Op(Kind.BACKWARD, chunk))
        return self._do(
            lambda: self._compute.backward(chunk, gradient), None if self._first else chunk
        )

    def input_backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        """Run I; return what the stage sends."""
        return self._do(
            lambda: self._compute.input_backward(chunk, gradient), None if self._first else chunk
        )

    def weight_backward(self, chunk: int) -> None:
        """Run W after the vote."""
        self._hear(Op(Kind.WEIGHT, chunk))
        self._do(lambda: self._compute.weight_backward(chunk), None)

    def head(self, chunk: int, received: Tensor) -> Tensor | None:
        """Refuse H: external training loops have the LM head on the last stage."""
        raise NotImplementedError(f"H{chunk}: a loop's output layer lies on its last stage")

    def head_weight(self, chunk: int) -> None:
        """Refuse G: external training loops have the LM head on the last stage."""
        raise NotImplementedError(f"G{chunk}: a loop's output layer lies on its last stage")

    def abandon(self) -> None:
        """Abandon the ops of the stage, and contribute to the vote."""
        if self._begun is not None:
            self._begun.abandon()
        if self._vote is not None:
            self._vote.cast()

    def _hear(self, op: Op) -> None:
        """Fail before ``last_op`` if a rank of the replica has misread a shape."""
        if self._vote is None or op != self._last_op or self.error is not None:
            return
        if not self._vote.passed:
            self._fail(MisreadCall("on another rank"))

    def _fail(self, error: Exception) -> None:
        self.error = error
        if self._vote is not None and isinstance(error, WrongShape):
            self._vote.misread = True
        self._compute.abandon()
        self._store.clear()

    def _do(self, run: Callable[[], Tensor | None], sends: int | None) -> Tensor | None:
        if self.error is None:
            try:
                result = run()
                # A model that does not use its input has no gradient for it.
                return result if result is not None or sends is None else self._zeros(sends)
            except (MemoryError, torch.OutOfMemoryError):
                raise  # the executor handles it
            except Exception as error:
                self._fail(error)
        return None if sends is None else self._zeros(sends)
