"""Breaks what stands in front of a loop's language model, another way in every batch.

Run inside a rank (``Trial.interfere``): ``around(number)`` surrounds the computation of a batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from unittest.mock import patch

from torch import Tensor

from megatron_epp.mcore.loops.model_front import EncodedDocuments


def _seen(change: Callable[[Tensor], Tensor]) -> AbstractContextManager:
    """What an encoder hands on of a whole document, [L, 1, H], is another thing."""
    plain = EncodedDocuments._encoded

    def encoded(self: EncodedDocuments, number: int):
        made = plain(self, number)
        made.hidden = change(made.hidden)
        return made

    return patch.object(EncodedDocuments, "_encoded", encoded)


def shift_what_was_seen() -> AbstractContextManager:
    """Every token has what was seen of the one before it."""
    return _seen(lambda hidden: hidden.roll(1, 0))


def give_it_no_gradient() -> AbstractContextManager:
    """What was seen has no graph: its backward never runs."""
    return _seen(lambda hidden: hidden.detach())


def run_its_backward_twice() -> AbstractContextManager:
    """With the last backward of a document's slices, and once more."""

    def twice(hidden: Tensor) -> Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: 2 * gradient)
        return hidden

    return _seen(twice)


def keep_the_first_gradient_alone() -> AbstractContextManager:
    """Of gradients that slices leave for what was seen those of the document's first arrive."""
    plain = EncodedDocuments.backward

    def backward(self: EncodedDocuments, chunk: int) -> None:
        if chunk in self._chunks:
            hidden, rows, _ = self._chunks[chunk]
            for part in rows:
                if part.span.start > 0:
                    hidden.grad[part.start : part.stop] = 0
        plain(self, chunk)

    return patch.object(EncodedDocuments, "backward", backward)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    shift_what_was_seen,
    give_it_no_gradient,
    run_its_backward_twice,
    keep_the_first_gradient_alone,
    nullcontext,
)
_BATCHES = count()


def around(number: int) -> AbstractContextManager:
    return WAYS[next(_BATCHES)]()
