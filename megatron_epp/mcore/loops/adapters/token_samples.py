"""Samples that a framework keeps as their tokens alone, each of its own length: what slime's and
verl's adapters have in common.

A token's label is the next one of its sample, as both shift them. t tokens of a slice
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
    """tokens_of(micro-batch): [L] of every sample. share_from: as of samples (samples.py)."""

    def __init__(self, tokens_of: Callable[[Any], Sequence[Tensor]], share_from: int = 0):
        self._tokens_of, self.share_from = tokens_of, share_from

    def lengths(self, micro_batch: Any) -> Sequence[int]:
        return tuple(map(len, self._tokens_of(micro_batch)))

    def prefixes(self, micro_batch: Any) -> PrefixForest:
        return shared_prefixes_of(self, micro_batch, self.share_from)

    def after(self, samples: Sequence[Tensor], number: int) -> int:
        """The label of a sample's last token; no loss of an answer reads it."""
        return 0

    def rows(
        self, micro_batch: Any, document: int, start: int, stop: int
    ) -> Mapping[str, Tensor | None]:
        samples = self._tokens_of(micro_batch)
        tokens = samples[document]
        labels = tokens[start + 1 : stop + 1]
        if stop == len(tokens):
            labels = pad(labels, (0, 1), value=self.after(samples, document))
        return {"tokens": tokens[None, start:stop], "labels": labels[None]}


def log_prob_step(temperature: float, entropy: bool) -> Callable[..., Any]:
    """A forward step for slices: log-probabilities of the labels, [1, t], or with entropies of
    the words' distributions [1, t, 2]. Rows named ``temperature`` come before the argument."""

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
    """``rows`` that were drawn, where the model is."""
    device = this_device()
    return {name: one if one is None else on_device(one, device) for name, one in rows.items()}


def zigzag_part(full_L: Tensor) -> Tensor:
    """Rows [l, ...] of a sample that this context-parallel rank has where they are cut as Megatron
    cuts them, zeros behind the sample's end among them; all of them where there is one rank."""
    ranks = mpu.get_context_parallel_world_size()
    if ranks <= 1:  # 0 without groups
        return full_L
    missing = -len(full_L) % (2 * ranks)
    padded = torch.cat([full_L, full_L.new_zeros(missing, *full_L.shape[1:])])
    return padded[zigzag(len(padded), ranks)[mpu.get_context_parallel_rank()].to(padded.device)]


def log_probs_and_entropies(outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """[T] each of samples one behind the other, from outputs of :func:`log_prob_step`."""
    joined = torch.cat(list(outputs))
    if joined.dim() == 1:
        return joined, None
    log_probs, entropies = joined.unbind(-1)
    return log_probs, entropies
