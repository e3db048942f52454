"""Adapter for documents packed into one row (THD) before the iterator yields them.

ms-swift, slime and verl pack inside the forward step, so their micro-batches contain no document
boundaries. These frameworks have their own adapters (megatron_epp.frameworks).

Entries of a micro-batch:

input_ids, labels, ...                 [1, T]
packed_seq_params                      boundaries of documents
cu_seqlens_q or cu_seqlens             boundaries of documents, if packed_seq_params is missing
cu_seqlens_q_padded                    boundaries of documents with their padding; no outputs are
                                       computed for padding
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

import torch
from torch import Tensor

from megatron_epp.mcore.loops.adapter import LOSS_KEYS, parts_of
from megatron_epp.mcore.loops.adapters.samples import Samples

_TOKENS = ("input_ids", "tokens")


class PackedDocuments(Samples):
    """Adapter for packed documents.

    In shapes, T is the number of rows of a packed micro-batch, including padding.

    Attributes:
        loss_of: The loop's loss function. It is called with the micro-batch and the outputs
            [1, T, ...], in which the outputs of padding are 0. If the loop collects results other
            than losses, it also receives ``non_loss_data=True``.
        keys: Names of the entries [1, T, ...] that forward steps draw; missing entries are skipped.
        loss_keys: Names of entries that may differ in a shared prefix: only the loss reads them.
    """

    def __init__(
        self,
        loss_of: Callable[..., Any],
        keys: Sequence[str] = ("input_ids", "tokens", "labels", "loss_mask", "position_ids"),
        loss_keys: Sequence[str] = LOSS_KEYS,
    ):
        super().__init__(loss_of, keys, loss_keys)

    @override
    def lengths(self, micro_batch: Mapping[str, Any]) -> Sequence[int]:
        return tuple(stop - start for start, stop in documents_of(micro_batch))

    @override
    def rows(
        self, micro_batch: Mapping[str, Any], document: int, start: int, stop: int
    ) -> Mapping[str, Tensor | None]:
        first, end = documents_of(micro_batch)[document]
        rows = slice(None), slice(first + start, min(first + stop, end))
        return parts_of(micro_batch, self.keys, rows)

    @override
    def laid_out(self, micro_batch: Mapping[str, Any], outputs: Sequence[Tensor]) -> Tensor:
        tokens = next(micro_batch[key] for key in _TOKENS if key in micro_batch)
        parts, reached = [], 0
        for (start, stop), output in zip(documents_of(micro_batch), outputs, strict=True):
            parts += [output.new_zeros(start - reached, *output.shape[1:]), output]
            reached = stop
        rest = tokens.shape[1] - reached
        parts.append(outputs[0].new_zeros(rest, *outputs[0].shape[1:]))
        return torch.cat(parts)[None]


def documents_of(micro_batch: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the row range (start, stop) of each non-empty document in a packed micro-batch.

    The ranges are read from ``packed_seq_params``, or else from ``cu_seqlens_q`` or ``cu_seqlens``.

    Raises:
        ValueError: The micro-batch has no boundaries, or the boundaries exceed its rows.
    """
    params = micro_batch.get("packed_seq_params")
    if params is None:
        ends = micro_batch.get("cu_seqlens_q", micro_batch.get("cu_seqlens"))
        padded = micro_batch.get("cu_seqlens_q_padded")
    else:
        ends, padded = params.cu_seqlens_q, params.cu_seqlens_q_padded
    if ends is None:
        raise ValueError(
            "a micro-batch without packed_seq_params or cu_seqlens: where do its documents end? "
            f"(it has {', '.join(map(str, micro_batch))})"
        )
    lengths = torch.diff(torch.as_tensor(ends).flatten()).tolist()
    starts = torch.as_tensor(ends if padded is None else padded).flatten().tolist()
    documents = [(a, a + length) for a, length in zip(starts, lengths, strict=False) if length > 0]
    tokens = next((micro_batch[key] for key in _TOKENS if key in micro_batch), None)
    if tokens is not None and documents and documents[-1][1] > tokens.shape[1]:
        raise ValueError(
            f"cu_seqlens end at row {documents[-1][1]}, the micro-batch has {tokens.shape[1]}; "
            "expected boundaries within it"
        )
    return documents
