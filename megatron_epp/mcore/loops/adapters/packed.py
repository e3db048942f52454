"""Micro-batches of documents one behind the other (THD), packed before the iterator gives them.

Those of ms-swift, slime and verl are packed inside of the forward step and tell no borders before:
they have adapters of their own (swift_packs.py, slime_samples.py, verl_samples.py).

input_ids, labels, ...                 [1, T]
packed_seq_params, or cu_seqlens       where documents begin and end; or cu_seqlens_q of the
                                       micro-batch itself
cu_seqlens_q_padded                    where each is padded to a multiple: the padding between
                                       two documents is computed by nobody here
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_epp.mcore.loops.adapter import LOSS_KEYS, parts_of
from megatron_epp.mcore.loops.adapters.samples import Samples

_TOKENS = ("input_ids", "tokens")


class PackedDocuments(Samples):
    """loss_of(micro-batch, outputs [1, T, ...]) is the loop's own loss; padding's outputs are 0.

    keys         what forward steps draw, as far as micro-batches have it: tensors [1, T, ...]
    share_from, loss_keys   as of samples (samples.py)
    """

    def __init__(
        self,
        loss_of: Callable[..., Any],
        keys: Sequence[str] = ("input_ids", "tokens", "labels", "loss_mask", "position_ids"),
        share_from: int = 0,
        loss_keys: Sequence[str] = LOSS_KEYS,
    ):
        super().__init__(loss_of, keys, share_from, loss_keys)

    def lengths(self, micro_batch: Mapping[str, Any]) -> Sequence[int]:
        return tuple(stop - start for start, stop in documents_of(micro_batch))

    def rows(
        self, micro_batch: Mapping[str, Any], document: int, start: int, stop: int
    ) -> Mapping[str, Tensor | None]:
        first, end = documents_of(micro_batch)[document]
        rows = slice(None), slice(first + start, min(first + stop, end))
        return parts_of(micro_batch, self.keys, rows)

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
    """Where each document begins, and where its last token is behind: rows of [1, T].

    ValueError: the micro-batch does not tell, or tells of more rows than it has.
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
            "expected borders within it"
        )
    return documents
