"""Adapter for samples that a framework stores as their tokens, the base for slime and verl.

A token's label is the next one of its sample, as in both frameworks. t tokens of a slice
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn.functional import pad

from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.layers.zigzag import zigzag
from megatron_epp.mcore.loops.adapter import shared_prefixes_of
from megatron_epp.mcore.loops.token_log_probs import model_log_probs
from megatron_epp.mcore.model.attention import this_device


class TokenSamples:
    """Adapter for samples of their own lengths.

    ``tokens_of(micro-batch)`` returns [L] for every sample; ``share_from`` is that of ``Samples``.
    """

    def __init__(self, tokens_of: Callable[[Any], Sequence[Tensor]], share_from: int = 0):
        self._tokens_of, self.share_from = tokens_of, share_from

    def lengths(self, micro_batch: Any) -> Sequence[int]:
        """Return the tokens of every sample."""
        return tuple(map(len, self._tokens_of(micro_batch)))

    def prefixes(self, micro_batch: Any) -> PrefixForest:
        """Return the samples and their shared prefixes."""
        return shared_prefixes_of(self, micro_batch, self.share_from)

    def after(self, samples: Sequence[Tensor], number: int) -> int:
        """Return the label of a sample's last token; no loss of an answer reads it."""
        return 0

    def rows(
        self, micro_batch: Any, document: int, start: int, stop: int
    ) -> Mapping[str, Tensor | None]:
        """Return tokens [start, stop) of a sample and their labels: [1, t] each."""
        samples = self._tokens_of(micro_batch)
        tokens = samples[document]
        labels = tokens[start + 1 : stop + 1]
        if stop == len(tokens):
            labels = pad(labels, (0, 1), value=self.after(samples, document))
        return {"tokens": tokens[None, start:stop], "labels": labels[None]}


def log_prob_step(temperature: float, entropy: bool) -> Callable[..., Any]:
    """Return a forward step for slices that computes log-probabilities of the labels.

    Its output is [1, t], or with entropies of the vocabulary distributions [1, t, 2]. Drawn rows
    named ``temperature`` replace the argument.
    """

    def forward_step(data_iterator: Any, model: Any) -> tuple[Any, None]:
        drawn = on_this_device(next(data_iterator))
        log_probs = model_log_probs(
            model,
            drawn["labels"],
            drawn.get("temperature", temperature),
            entropy,
            {"input_ids": drawn["tokens"], "position_ids": None, "attention_mask": None},
        )
        return (torch.stack(log_probs, dim=-1) if isinstance(log_probs, tuple) else log_probs), None

    return forward_step


def in_training(model: Any) -> bool:
    """Return whether ``model``, wrapped or not, is in training mode."""
    (inner,) = unwrap_model([model])
    return bool(inner.training)


def on_this_device(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the drawn ``rows`` on the model's device."""
    device = this_device()
    return {name: one if one is None else on_device(one, device) for name, one in rows.items()}


def zigzag_part(full_L: Tensor) -> Tensor:
    """Return the rows [l, ...] of a sample on this context-parallel rank, in Megatron's layout.

    They include zeros after the end of the sample. With one rank, these are all rows.
    """
    ranks = mpu.get_context_parallel_world_size()
    if ranks <= 1:  # 0 without groups
        return full_L
    missing = -len(full_L) % (2 * ranks)
    padded = torch.cat([full_L, full_L.new_zeros(missing, *full_L.shape[1:])])
    return padded[zigzag(len(padded), ranks)[mpu.get_context_parallel_rank()].to(padded.device)]


def log_probs_and_entropies(outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities and entropies [T] of concatenated samples.

    ``outputs`` are those of :func:`log_prob_step`.
    """
    joined = torch.cat(list(outputs))
    if joined.dim() == 1:
        return joined, None
    log_probs, entropies = joined.unbind(-1)
    return log_probs, entropies
