"""Slicing mode in NeMo-RL: slices compute log-probabilities, and NeMo-RL computes its losses.

NeMo-RL's forward step computes logits, and its post-processing function computes losses or
log-probabilities from logits. Its losses also accept log-probabilities of fused linear layers
(``use_fused_linear_logprobs``). Here slices provide these log-probabilities.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_epp.mcore.loops.adapter import refuse_asked
from megatron_epp.mcore.loops.adapters.token_samples import TokenSamples, log_prob_step
from megatron_epp.mcore.model.attention import this_device

_LOSS, _LOG_PROBS = "LossPostProcessor", "LogprobsPostProcessor"


class NemoSamples(TokenSamples):
    """Adapter of NeMo-RL's micro-batches."""

    # Losses cover full samples on every context-parallel rank; NeMo-RL divides them by the ranks.
    partial_loss = True

    def __init__(self) -> None:
        super().__init__(_tokens_of)

    def sliced(self, forward_step: Callable[..., Any], model: Any) -> Callable[..., Any]:
        """Return the forward step that computes slices in place of the loop's ``forward_step``.

        Raises:
            ValueError: The forward step is not NeMo-RL's, or slices do not support its settings.
        """
        named = getattr(forward_step, "keywords", {})
        processor, sampling = named.get("post_processing_fn"), named.get("sampling_params")
        kind = type(processor).__name__
        if kind not in (_LOSS, _LOG_PROBS):
            raise ValueError(
                f"slices of NeMo-RL's micro-batches: its forward step is post-processed by {kind}; "
                f"expected {_LOSS} or {_LOG_PROBS}: use Megatron's own schedule (no attach)"
            )
        loss = getattr(processor, "loss_fn", None)
        takes = getattr(getattr(loss, "input_type", None), "value", None)
        asked = {
            f"a loss of {takes}s, where slices give log-probabilities": kind == _LOSS
            and takes != "logprob",
            "a prepare_fn, which takes logits": getattr(processor, "prepare_fn", None) is not None,
            "top-k or top-p sampling, which leaves words out": sampling is not None
            and (sampling.top_k not in (None, -1) or sampling.top_p != 1.0),
            "a draft model": named.get("draft_model") is not None,
            "router replay": named.get("use_router_replay", False),
        }
        refuse_asked("NeMo-RL's", "it asks", asked)
        self._named = named
        return log_prob_step(1.0 if sampling is None else sampling.temperature, entropy=False)

    def loss(self, micro_batch: Any, outputs: Sequence[Tensor], non_loss_data: bool = False) -> Any:
        """Return the result of NeMo-RL's post-processing function for the micro-batch."""
        data, processor = micro_batch.data_dict, copy.copy(self._named["post_processing_fn"])
        # Samples stay unpacked, because packing does not change NeMo-RL's losses.
        width = data["input_ids"].shape[1]
        logprobs_BS = torch.stack([pad(one, (0, width - len(one))) for one in outputs])
        if type(processor).__name__ == _LOG_PROBS:
            processor.use_fused_linear_logprobs = True
            return processor(data_dict=data, input_ids=None, cu_seqlens_padded=None)(logprobs_BS)
        processor.loss_fn = copy.copy(processor.loss_fn)
        processor.loss_fn.use_fused_linear_logprobs = True
        valid = {name: self._named.get(name) for name in ("global_valid_seqs", "global_valid_toks")}
        return processor(data_dict=data, packed_seq_params=None, **valid)(logprobs_BS)


def _tokens_of(micro_batch: Any) -> Sequence[Tensor]:
    data = micro_batch.data_dict
    if pictures := data.get_multimodal_dict(as_tensors=True, device=this_device()):
        raise ValueError(
            f"a micro-batch of NeMo-RL's has {', '.join(pictures)}; its slices are of text: use "
            "Megatron's own schedule (no attach)"
        )
    tokens_BS: Tensor = data["input_ids"]
    lengths = data.get("input_lengths")
    if lengths is None:
        return tokens_BS.unbind()
    ends = torch.as_tensor(lengths).tolist()
    return [row[:end] for row, end in zip(tokens_BS, ends, strict=True)]
