"""Log-probabilities of tokens by a loop's model, without saving all logits at once.

The model runs up to its final norm, under any schedule, in slices or not. The LM head then
processes the hidden states in blocks of rows (layers/lm_head/log_probs.py).

In shapes, B is the number of samples, S the number of tokens of a sample, and H the hidden size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.layers.lm_head.log_probs import block_log_probs
from megatron_epp.layers.lm_head.vocabulary import OutputWeightShard, statistics_dtype
from megatron_epp.mcore.lm_head.fused_head import rows_at_once
from megatron_epp.mcore.loops.model_front import language_part


def model_log_probs(
    model: Any,
    labels_BS: Tensor | None,
    temperature: float | Tensor,
    entropy: bool,
    inputs: Mapping[str, Any],
) -> Any:
    """Return the log-probabilities of the labels; see :func:`megatron_epp.log_probs`.

    Args:
        model: The loop's model, wrapped or not.
        labels_BS: [samples, tokens] Labels of all tokens; may be None before the last stage.
        temperature: Divisor of the logits, or a tensor that expands to [B, S].
        entropy: Whether to return the entropies, too.
        inputs: Arguments of the model's forward.

    Returns:
        On the last stage, log-probabilities [B, S]; with ``entropy``, a pair of log-probabilities
        and entropies. On other stages, the output of the model.

    Raises:
        ValueError: The labels are missing, the labels or the temperature have a wrong shape, the
            temperature is not positive, or the model or its LM head is not supported.
    """
    (inner,) = unwrap_model([model])
    part = language_part(inner)
    if not part.post_process:
        return model(**inputs)
    weight_VH = _output_weight(part)
    part.post_process = False  # the decoder has the final norm and an attribute of its own
    try:
        hidden_SBH = model(**inputs)
    finally:
        part.post_process = True
    if labels_BS is None:
        raise ValueError("log_probs: labels=None on the last stage; expected [B, S] tokens")
    ranks, group = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_group()
    scattered = ranks > 1 and bool(part.output_layer.sequence_parallel)
    rows = hidden_SBH.shape[0] * (ranks if scattered else 1), hidden_SBH.shape[1]
    if labels_BS.dim() != 2 or tuple(labels_BS.t().shape) != rows:
        raise ValueError(
            f"log_probs: labels are {list(labels_BS.shape)}, the model's hidden states are of "
            f"{rows[1]} samples of {rows[0]} tokens; expected a label for every token, [B, S]"
        )
    words = OutputWeightShard(
        weight_VH.detach(),
        mpu.get_tensor_model_parallel_rank() * len(weight_VH),
        rows_at_once(len(weight_VH), weight_VH.is_cuda),
        group if ranks > 1 else None,
        scattered,
    )
    log_probs_T, entropy_T = block_log_probs(
        hidden_SBH.flatten(0, 1),
        weight_VH,
        labels_BS.t().flatten(),
        words,
        _temperatures(part.config, temperature, labels_BS, statistics_dtype(weight_VH.dtype)),
        entropy,
    )
    log_probs_BS, entropy_BS = (one.view(rows).t().contiguous() for one in (log_probs_T, entropy_T))
    return (log_probs_BS, entropy_BS) if entropy else log_probs_BS


def _output_weight(part: Any) -> Any:
    """Return this rank's vocabulary rows of the LM head's weight.

    Raises:
        ValueError: The LM head has parameters other than its weight, or the model has MTP layers.
    """
    if part.config.mtp_num_layers:
        raise ValueError(
            "log_probs: the model has MTP layers (mtp_num_layers), whose losses are made "
            "of its logits; expected a model without"
        )
    layer = part.output_layer
    if part.share_embeddings_and_output_weights:
        weight = part.shared_embedding_or_output_weight()
    else:
        weight = getattr(layer, "weight", None)
    besides = [one for one in layer.parameters() if one is not weight]
    if weight is None or besides:
        raise ValueError(
            f"log_probs: the LM head, a {type(layer).__name__}, has {len(besides)} tensors "
            "next to its weight (a bias, adapters); expected one weight"
        )
    return weight


def _temperatures(
    config: Any, temperature: float | Tensor, labels_BS: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return the divisors of the logits [T]; None if they are all 1.

    Raises:
        ValueError: The temperature is not positive, or does not expand to the labels' shape.
    """
    scale = getattr(config, "mup_output_mult", 1.0) if getattr(config, "use_mup", False) else 1.0
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"log_probs: temperature {temperature}; expected more than 0")
        if temperature / scale == 1:
            return None
        return torch.full(
            (labels_BS.numel(),), temperature / scale, dtype=dtype, device=labels_BS.device
        )
    try:
        every_BS = temperature.to(dtype).expand(labels_BS.shape)
    except RuntimeError:
        raise ValueError(
            f"log_probs: temperature is {list(temperature.shape)}, labels are "
            f"{list(labels_BS.shape)}; expected one that expands to them"
        ) from None
    return every_BS.t().flatten() / scale
