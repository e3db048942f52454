"""Attention over heads, in Megatron."""

from typing import Any, ClassVar

from megatron_epp.cost.kinds.attention import AttentionPart
from megatron_epp.mcore.flags.replaced import ReplacedFlags
from megatron_epp.mcore.model.kinds.base import LayerPlace, MegatronPart
from megatron_epp.mcore.model.kinds.states import DELTA, MegatronDelta
from megatron_epp.mcore.model.limit import Limit, given, not_computed, of_config

SPARSE = "dsa"


def _undivided(model: Any) -> str | None:
    """Text on heads that context-parallel ranks cannot share."""
    from megatron_epp.layers.attention.ulysses import refuse_heads

    config = model.config
    heads, groups = config.num_attention_heads, config.num_query_groups or 0
    tensor, context = config.tensor_model_parallel_size, config.context_parallel_size
    if config.multi_latent_attention or not groups:
        groups = heads
    try:
        refuse_heads(heads // tensor, max(1, groups // tensor), context)
    except ValueError as refusal:
        return str(refusal)
    return None


class MegatronAttention(MegatronPart):
    """Attention: in all layers but the MLPs, experts and layers with a state of a HybridModel."""

    PRICED, NAME, LETTER, LETTERS = AttentionPart, "attention", "*", "*+D"
    ABSENT: ClassVar = {"attention": False}
    SLOT = "self_attention"
    TIMED: ClassVar = {"layernorm": "input_layernorm"}
    STACK = "attention_layer"
    LIMITS: tuple[Limit, ...] = (
        Limit(
            "other attention variants (--experimental-attention-variant)",
            "use plain softmax attention, or run without --epp",
            given("experimental_attention_variant", harmless=(DELTA, SPARSE)),
            slices=of_config(given("experimental_attention_variant", harmless=(DELTA,))),
        ),
        Limit(
            "heads that do not divide over context-parallel ranks, in slices of loops",
            "choose a context-parallel degree that divides them",
            slices=_undivided,
        ),
        Limit(
            "clipping and logging of attention logits (--qk-clip, --log-max-attention-logit)",
            "leave them out: the attention of slices keeps no largest logit",
            given("qk_clip", "log_max_attention_logit"),
        ),
        Limit(
            "dropout in attention (--attention-dropout above 0)",
            "give --attention-dropout 0: how a document is cut must not change its loss",
            given("attention_dropout", harmless=(0,)),
            slices=not_computed(attention_dropout="dropout in attention"),
        ),
    )
    REPLACED = (
        ReplacedFlags(
            "attention_dropout",
            "Megatron's default; attention goes without dropout, as how a document is cut must not "
            "change its loss",
            neutral=lambda args: {"attention_dropout": 0.0},
            default_too=True,
            untyped=True,
        ),
    )

    def layers(self, args: Any) -> tuple[bool, ...]:
        """But those that have a gated delta net in its place."""
        others = MegatronDelta().layers(args)
        return tuple(a and not b for a, b in zip(super().layers(args), others, strict=True))

    def model_sizes(self, args: Any) -> dict[str, Any]:
        groups = args.num_query_groups or args.num_attention_heads
        return {"kv_heads": groups, "head_size": args.kv_channels}

    def local_layer(self, config: Any) -> Any:
        from megatron_epp.mcore.model.local_layers import attention_alone

        return attention_alone(config, latents=False)

    def mend_local(self, layer: Any, config: Any) -> None:
        from megatron_epp.mcore.model.local_layers import mend_heads

        mend_heads(layer, config)

    def heads(self, config: Any, context: int) -> Any:
        from megatron_epp.mcore.model.elastic_attention import heads_of_rank

        return heads_of_rank(config, context)

    def holds(self, module: Any) -> bool:
        from megatron.core.transformer.attention import Attention
        from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
            AbsorbedMLASelfAttention,
        )
        from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

        others = MultiLatentAttention, AbsorbedMLASelfAttention
        return isinstance(module, Attention) and not isinstance(module, others)

    def install(self, place: LayerPlace) -> None:
        from megatron_epp.mcore.model.elastic_attention import install_heads

        install_heads(place)

    def elastic(self, layer: Any) -> Any:
        """The elastic module that replaces the layer's attention."""
        return layer.self_attention.core_attention.forward

    def kept_shapes(self, layer: Any, context: int) -> tuple[tuple[int, ...], ...]:
        config = layer.config
        ranks = config.tensor_model_parallel_size * config.context_parallel_size
        heads = max(1, config.num_query_groups // ranks)
        return ((context, heads, config.kv_channels),) * 2

    def stores_last_slice(self, layer: Any) -> bool:
        return bool(self.elastic(layer).stores_last_slice)
