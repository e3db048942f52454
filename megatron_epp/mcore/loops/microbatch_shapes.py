"""Shapes of a call's micro-batches, read from the micro-batches or returned by the loop's function.

Megatron's stages exchange the shape of every message before the message is sent. Here all shapes
are known before the first op. They follow from the call's arguments if sequences are padded to one
length, and otherwise from the micro-batches on the ranks that read them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_epp.frameworks.rows import lengths_between
from megatron_epp.planner.calls.microbatch import MicrobatchShape

# Returns the shape of a micro-batch that the loop's iterator yields; None if unknown.
ShapeFunction = Callable[[Any], MicrobatchShape | int | None]


def shape_of(micro_batch: Any) -> MicrobatchShape | None:
    """Return the shape of a micro-batch that is a mapping with ``tokens`` or ``input_ids`` [B, S].

    Return None for any other micro-batch. Micro-batches of packed documents must also contain
    ``packed_seq_params`` or ``cu_seqlens``, from which the document lengths are computed.
    """
    if not isinstance(micro_batch, Mapping):
        return None
    tokens = next((micro_batch.get(k) for k in ("tokens", "input_ids") if k in micro_batch), None)
    if not torch.is_tensor(tokens) or tokens.dim() != 2 or tokens.is_nested:
        return None
    samples, rows = tokens.shape
    params = micro_batch.get("packed_seq_params")
    boundaries = micro_batch.get("cu_seqlens") if params is None else params.cu_seqlens_q
    if boundaries is None:
        return MicrobatchShape(rows, samples)
    return MicrobatchShape(rows * samples, 1, lengths_between(boundaries))


def on_ranks_of_its_own(micro_batch: Any) -> bool:
    """Return whether a micro-batch sets its own number of context-parallel ranks.

    In that case, the number of rows of a message does not follow from the number of tokens.
    """
    try:
        params = micro_batch.get("packed_seq_params", None)
        sizes = getattr(params, "local_cp_size", None), micro_batch.get("local_cp_size", None)
    except Exception:  # not a mapping, or of another form
        return False
    return any(size is not None for size in sizes)


def measured(micro_batch: Any, by: ShapeFunction | None, number: int) -> MicrobatchShape | None:
    """Return the shape of a micro-batch; None if it is unknown.

    Args:
        micro_batch: The micro-batch.
        by: Function that returns the shape: the loop's own ``lengths``, or a framework's reader.
            None selects :func:`shape_of`.
        number: Number of the micro-batch, used in messages.

    Raises:
        ValueError: ``by`` returns another value than a shape, a positive number of rows, or None.
    """
    if on_ranks_of_its_own(micro_batch):
        return None
    if by is None:
        try:
            return shape_of(micro_batch)
        except Exception:  # a mapping of another form; the error would not help the user
            return None
    shape = by(micro_batch)
    if isinstance(shape, bool) or not isinstance(shape, MicrobatchShape | int | None):
        raise ValueError(
            f"lengths(micro-batch {number}) gave {type(shape).__name__}; expected a "
            "MicrobatchShape, or the rows of its hidden states as a whole number"
        )
    try:
        return MicrobatchShape(shape) if isinstance(shape, int) else shape
    except ValueError as refusal:
        raise ValueError(f"lengths(micro-batch {number}): {refusal}") from refusal
