"""Guard of a stage: after a failure, the stage sends zeros, so that no other rank blocks."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_epp.runtime.executor import Compute
from megatron_epp.runtime.kv_store import Store


class FailureGuard:
    """Wrapper of a stage's ``compute`` that catches exceptions of the loop's forward step or loss.

    After an exception the stage computes nothing, but still sends every message of the plan, filled
    with zeros. All gradients are then invalid. The tensor- and context-parallel ranks of the stage
    must fail together; otherwise they block in a collective of a layer. Out-of-memory errors are
    not caught.

    Args:
        compute: The stage that computes the ops, or the exception that its construction raised.
        store: K/V store of the stage, which is cleared after an exception.
        zeros: Function that returns a message of zeros for a chunk.
        first: Whether this is the first stage.
        last: Whether this is the last stage.

    Attributes:
        error: The first exception; None if no exception was raised.
    """

    def __init__(
        self,
        compute: Compute | Exception,
        store: Store,
        zeros: Callable[[int], Tensor],
        first: bool,
        last: bool,
    ):
        self._store, self._zeros = store, zeros
        self._first, self._last = first, last
        self.error = compute if isinstance(compute, Exception) else None
        self._begun = None if isinstance(compute, Exception) else compute

    @property
    def _compute(self) -> Compute:
        assert self._begun is not None, "a stage that could not begin computes nothing"
        return self._begun

    def forward(self, chunk: int, received: Tensor | None) -> Tensor | None:
        """Run F of ``chunk`` and return the hidden states to send."""
        return self._do(
            lambda: self._compute.forward(chunk, received), None if self._last else chunk
        )

    def backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        """Run B of ``chunk`` and return the gradient to send."""
        return self._do(
            lambda: self._compute.backward(chunk, gradient), None if self._first else chunk
        )

    def input_backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        """Run I of ``chunk`` and return the gradient to send."""
        return self._do(
            lambda: self._compute.input_backward(chunk, gradient), None if self._first else chunk
        )

    def weight_backward(self, chunk: int) -> None:
        """Run W of ``chunk``."""
        self._do(lambda: self._compute.weight_backward(chunk), None)

    def head(self, chunk: int, received: Tensor) -> Tensor | None:
        """Raise NotImplementedError, because loops have the LM head on the last stage alone."""
        raise NotImplementedError(f"H{chunk}: in external loops the LM head is on the last stage")

    def head_weight(self, chunk: int) -> None:
        """Raise NotImplementedError, because loops have the LM head on the last stage alone."""
        raise NotImplementedError(f"G{chunk}: in external loops the LM head is on the last stage")

    def abandon(self) -> None:
        """Free the tensors that the stage saved for later ops."""
        if self._begun is not None:
            self._begun.abandon()

    def _fail(self, error: Exception) -> None:
        self.error = error
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
