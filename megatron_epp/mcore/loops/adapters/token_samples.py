"""Base of the adapters of slime and verl, whose micro-batches contain the tokens of each sample.

As in both frameworks, a token's label is the next token of its sample. In shapes, L is the number
of tokens of a sample, and t the number of tokens of a slice.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn.functional import pad

from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.layers.zigzag import zigzag
from megatron_epp.mcore.loops.token_log_probs import model_log_probs
from megatron_epp.mcore.model.attention import this_device


class TokenSamples:
    """Adapter for micro-batches of unpadded samples with different lengths.

    Args:
        tokens_of: Function that returns the tokens [L] of every sample of a micro-batch.
    """

    def __init__(self, tokens_of: Callable[[Any], Sequence[Tensor]]):
        self._tokens_of = tokens_of

    def lengths(self, micro_batch: Any) -> Sequence[int]:
        """Return the number of tokens of every sample."""
        return tuple(map(len, self._tokens_of(micro_batch)))

    def after(self, samples: Sequence[Tensor], number: int) -> int:
        """Return 0, the label of the last token of sample ``number``; no loss reads this label."""
        return 0

    def rows(
        self, micro_batch: Any, document: int, start: int, stop: int
    ) -> Mapping[str, Tensor | None]:
        """Return ``tokens`` [start, stop) of a sample and their ``labels``, two tensors [1, t]."""
        samples = self._tokens_of(micro_batch)
        tokens = samples[document]
        labels = tokens[start + 1 : stop + 1]
        if stop == len(tokens):
            labels = pad(labels, (0, 1), value=self.after(samples, document))
        return {"tokens": tokens[None, start:stop], "labels": labels[None]}


def log_prob_step(temperature: float, entropy: bool) -> Callable[..., Any]:
    """Return a forward step for slices that computes log-probabilities of the labels.

    The forward step returns log-probabilities [1, t], or log-probabilities and entropies [1, t, 2].

    Args:
        temperature: Divisor of the logits. If the data iterator yields an entry ``temperature``,
            the values of this entry are used instead.
        entropy: Whether to compute the entropies of the vocabulary distributions, too.
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
    """Copy the drawn ``rows`` to this rank's device; entries that are None stay None."""
    device = this_device()
    return {name: one if one is None else on_device(one, device) for name, one in rows.items()}


def zigzag_part(full_L: Tensor) -> Tensor:
    """Return this context-parallel rank's rows of a sample [L, ...], in Megatron's zigzag order.

    The sample is first padded with zeros to a multiple of twice the number of context-parallel
    ranks. With one rank, the sample is returned unchanged.
    """
    ranks = mpu.get_context_parallel_world_size()
    if ranks <= 1:  # 0 without groups
        return full_L
    missing = -len(full_L) % (2 * ranks)
    padded = torch.cat([full_L, full_L.new_zeros(missing, *full_L.shape[1:])])
    return padded[zigzag(len(padded), ranks)[mpu.get_context_parallel_rank()].to(padded.device)]


def log_probs_and_entropies(outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Concatenate outputs of :func:`log_prob_step`; return log-probabilities and entropies [T].

    If the outputs contain no entropies, the second result is None.
    """
    joined = torch.cat(list(outputs))
    if joined.dim() == 1:
        return joined, None
    log_probs, entropies = joined.unbind(-1)
    return log_probs, entropies
