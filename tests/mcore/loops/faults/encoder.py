"""Faults of what stands before a loop's language model."""

from collections.abc import Callable

from torch import Tensor

from megatron_epp.mcore.loops.model_front import EncodedDocuments
from tests.mcore.fault_injection import Fault, Faults, fault, in_turn, nothing


def seen(change: Callable[[Tensor], Tensor]) -> Fault:
    """Return a fault: what an encoder hands on of a document, [L, 1, H], is another thing."""

    def encoded(original, documents: EncodedDocuments, number: int):
        made = original(documents, number)
        made.hidden = change(made.hidden)
        return made

    return fault(EncodedDocuments, "_encoded", encoded)


def run_its_backward_twice(hidden: Tensor) -> Tensor:
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: 2 * gradient)
    return hidden


def keep_the_first_gradient_alone(backward, documents: EncodedDocuments, chunk: int) -> None:
    if chunk in documents._chunks:
        hidden, rows, _ = documents._chunks[chunk]
        for part in rows:
            if part.span.start > 0:
                hidden.grad[part.start : part.stop] = 0
    backward(documents, chunk)


FAULTS: Faults = {
    "nothing": nothing,
    # Every token has what was seen of the one before it.
    "shift what was seen": seen(lambda hidden: hidden.roll(1, 0)),
    # What was seen has no graph: its backward never runs.
    "give it no gradient": seen(lambda hidden: hidden.detach()),
    # With the last backward of a document's slices, and once more.
    "run its backward twice": seen(run_its_backward_twice),
    # Of gradients that slices leave for what was seen those of the document's first arrive.
    "keep the first gradient alone": fault(
        EncodedDocuments, "backward", keep_the_first_gradient_alone
    ),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
