"""Slicing mode in verl: an adapter of nested micro-batches, and an engine in verl's registry.

verl's forward step packs samples and computes log-probabilities from logits. The adapter's forward
step computes slices instead, without logits. The adapter passes log-probabilities and entropies of
the slices, nested as in verl, to ``postprocess_micro_batch_func`` of verl's engine. This function
calls verl's policy loss.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, override

import torch
from torch import Tensor

import megatron_epp
from megatron_epp.mcore.loops.adapter import refuse_asked
from megatron_epp.mcore.loops.adapters.token_samples import (
    TokenSamples,
    log_prob_step,
    log_probs_and_entropies,
)
from megatron_epp.mcore.model.attention import this_device

VENDOR = "megatron_epp"  # value of VERL_ENGINE_VENDOR


class VerlSamples(TokenSamples):
    """Adapter of verl's micro-batches.

    Args:
        tensor_ranks: Tensor-parallel size of verl's engine, which determines its padding.
        context_ranks: Context-parallel size of verl's engine, which determines its padding.
    """

    def __init__(self, tensor_ranks: int = 1, context_ranks: int = 1):
        super().__init__(_tokens_of)
        self._tensor_ranks, self._context_ranks = tensor_ranks, context_ranks
        self._pads_to_rows = _pads_to_rows()

    def after(self, samples: Sequence[Tensor], number: int) -> int:
        """Return the label that verl gives to the last token of sample ``number`` of a pack.

        The label is padding (0) if verl pads the sample. Otherwise it is the first token of the
        next sample (after the last sample, of the first one) or, with context parallelism, of the
        same sample. verl pads samples to a multiple of TP tokens or, with context parallelism, of
        2 x TP x CP tokens. Before release 0.9.1, context parallelism pads only shorter samples.
        """
        length = len(samples[number])
        if self._context_ranks > 1:
            least = 2 * self._tensor_ranks * self._context_ranks
            padded = length % least if self._pads_to_rows else length < least
            return 0 if padded else int(samples[number][0])
        padded = length % self._tensor_ranks
        return 0 if padded else int(samples[(number + 1) % len(samples)][0])

    @override
    def lengths(self, micro_batch: Any) -> Sequence[int]:
        _require_text(micro_batch)
        return super().lengths(micro_batch)

    @override
    def rows(
        self, micro_batch: Any, document: int, start: int, stop: int
    ) -> Mapping[str, Tensor | None]:
        tensors = super().rows(micro_batch, document, start, stop)
        temperature = micro_batch["temperature"]
        if isinstance(temperature, Tensor):  # a value per sample
            temperature = float(temperature.flatten()[document])
        divisor = torch.full((1, stop - start), float(temperature), dtype=torch.float64)
        return {**tensors, "temperature": divisor}

    def sliced(self, forward_step: Callable[..., Any], model: Any) -> Callable[..., Any]:
        """Return the forward step that computes slices in place of the loop's ``forward_step``.

        Raises:
            ValueError: The forward step is not verl's, or slices do not support its settings.
        """
        engine = getattr(getattr(forward_step, "func", None), "__self__", None)
        finish = getattr(forward_step, "keywords", {}).get("postprocess_micro_batch_func")
        if engine is None or finish is None:
            raise ValueError(
                "slices of verl's micro-batches: the forward step is not its Megatron engine's "
                "with a language model's head: use Megatron's own schedule (no attach)"
            )
        config = engine.engine_config
        asked = {
            "dynamic_context_parallel": config.dynamic_context_parallel,
            "use_fused_kernels": config.use_fused_kernels,
            "router_replay": engine.enable_routing_replay,
            "pad_to_length": config.pad_to_length,
            "use_remove_padding=False": not config.use_remove_padding,
        }
        refuse_asked("verl's", "its engine asks", asked)
        self._finish = finish
        return log_prob_step(1.0, entropy=True)

    def loss(self, micro_batch: Any, outputs: Sequence[Tensor], non_loss_data: bool = False) -> Any:
        """Return the result of verl's ``postprocess_micro_batch_func`` for the micro-batch."""
        lengths = [len(one) for one in outputs]
        output = dict(zip(("log_probs", "entropy"), log_probs_and_entropies(outputs), strict=True))
        if not _setting(micro_batch, "calculate_entropy"):
            del output["entropy"]
        nested = {
            name: torch.nested.as_nested_tensor(list(joined.split(lengths)), layout=torch.jagged)
            for name, joined in output.items()
            if joined is not None
        }
        output = self._finish(nested, data=micro_batch.to(this_device()))
        if len(output) == 2:
            return output
        # verl divides the tokens by the context-parallel size; here only one rank counts them.
        loss, tokens, report = output
        return loss, tokens * self._context_ranks, report


def register_engine(**options: Any) -> None:
    """Register an engine in verl whose language models compute slices.

    verl uses this engine instead of its own Megatron engine if the environment variable
    VERL_ENGINE_VENDOR is ``megatron_epp``.

    Args:
        options: Keywords of :func:`megatron_epp.attach`, such as ``share_from``.

    Example:
        >>> from megatron_epp.frameworks.verl.slices import register_engine
        >>> register_engine(memory_gib=40)  # before verl's trainer starts
    """
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    class SlicedEngine(MegatronEngineWithLMHead):  # type: ignore[misc, no-any-unimported]
        def initialize(self) -> None:
            super().initialize()
            config = self.engine_config
            samples = VerlSamples(config.tensor_model_parallel_size, config.context_parallel_size)
            megatron_epp.attach(self.module, samples, **options)

    EngineRegistry.register(model_type="language_model", backend="megatron", vendor=VENDOR)(
        SlicedEngine
    )


def _pads_to_rows() -> bool:
    """Return whether verl is a checkout, or 0.9.1 or later."""
    try:
        numbers = re.match(r"\d+(\.\d+)*", metadata.version("verl"))
    except metadata.PackageNotFoundError:
        return True
    return numbers is None or tuple(map(int, numbers[0].split("."))) >= (0, 9, 1)


def _tokens_of(micro_batch: Any) -> Sequence[Tensor]:
    nested = micro_batch["input_ids"]
    values: Tensor = nested.values()
    return values.split(nested.offsets().diff().tolist())


def _setting(micro_batch: Any, name: str) -> Any:
    """Return the non-tensor value ``name`` of a micro-batch; None if it is missing."""
    value = micro_batch.get(name, None)
    return getattr(value, "data", value)


def _require_text(micro_batch: Any) -> None:
    asked = [
        name
        for name in ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")
        if _setting(micro_batch, name)
    ]
    pictures = _setting(micro_batch, "multi_modal_inputs")
    if pictures is not None and any(len(one) for one in pictures if one is not None):
        asked.append("multi_modal_inputs")
    if asked:
        raise ValueError(
            f"a micro-batch of verl's asks for {', '.join(asked)}; slices give log-probabilities "
            "and entropies of text: use Megatron's own schedule (no attach)"
        )
