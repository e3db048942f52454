"""Multi-head attention in Megatron's flags."""

import math
from typing import Any, ClassVar, override

from megatron_epp.cost.kinds.attention import AttentionPart
from megatron_epp.layers.attention.layer_attention import Heads
from megatron_epp.layers.attention.ulysses import refuse_heads
from megatron_epp.mcore.flags.replaced import ReplacedFlags
from megatron_epp.mcore.kinds.base import LayerKind, layers_with, query_groups
from megatron_epp.mcore.kinds.limit import Limit
from megatron_epp.mcore.kinds.ssm.kind import GatedDeltaNetKind


def derived_symbols(kind: type[LayerKind]) -> str:
    """Return the layer symbols of the class ``kind`` and of its subclasses."""
    return kind.SYMBOL + "".join(map(derived_symbols, kind.__subclasses__()))


def _undivided(model: Any) -> str | None:
    """Return the reason why context-parallel ranks cannot shard the heads; None if they can."""
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


ODD_ROTARY = "an odd number of rotary channels of a head, times --rotary-percent; give an even one"


def odd_rotary(args: Any, channels: int) -> bool:
    """Return whether the number of rotary channels is odd, so that channels cannot be paired.

    This number is ``channels`` times --rotary-percent.
    """
    return int(channels * (getattr(args, "rotary_percent", None) or 1.0)) % 2 == 1


def _odd_rotary(args: Any) -> bool:
    if args.position_embedding_type not in ("rope", "yarn", "mrope"):
        return False
    latent = getattr(args, "multi_latent_attention", False)  # MLA checks its own sizes
    channels = getattr(args, "kv_channels", None)
    if channels is None:  # as Megatron's validation sets it
        channels = (args.hidden_size or 0) // (args.num_attention_heads or 1)
    return not latent and odd_rotary(args, channels)


_ODD_ROTARY = Limit(
    "an odd number of rotary channels per head (--kv-channels, by default --hidden-size over "
    "--num-attention-heads, times --rotary-percent)",
    "give an even number",
    _odd_rotary,
)


class AttentionKind(LayerKind):
    """Multi-head attention in layers of a GPTModel, and in the * layers of a HybridModel."""

    PRICED, NAME, SYMBOL = AttentionPart, "attention", "*"
    ABSENT: ClassVar = {"attention": False}
    SLOT = "self_attention"
    TIMED: ClassVar = {"layernorm": "input_layernorm"}
    STACK = "attention_layer"
    LIMITS: tuple[Limit, ...] = (
        Limit(
            "CP: a number of heads that the context-parallel degree does not divide, in slices of "
            "external loops",
            "choose a context-parallel degree that divides it",
            slices=_undivided,
        ),
        Limit(
            "clipping and logging of attention logits (--qk-clip, --log-max-attention-logit)",
            "leave them out: the attention of slices does not compute the largest logit",
            "qk_clip log_max_attention_logit",
        ),
        Limit(
            "dropout in attention (--attention-dropout above 0)",
            "give --attention-dropout 0: how a document is cut must not change its loss",
            "attention_dropout",
            {"attention_dropout": "dropout in attention"},
        ),
        _ODD_ROTARY,
    )
    REPLACED = (
        ReplacedFlags(
            "attention_dropout",
            "if not given, 0 replaces Megatron's default, because how a document is cut must not "
            "change its loss",
            neutral=lambda args: {"attention_dropout": 0.0},
            default_too=True,
            untyped=True,
        ),
    )

    def layers(self, args: Any) -> tuple[bool, ...]:
        """Return the mask of layers with softmax attention of any kind: one bool per layer."""
        layers = layers_with(args, derived_symbols(AttentionKind))
        others = GatedDeltaNetKind().layers(args)
        return tuple(a and not b for a, b in zip(layers, others, strict=True))

    @override
    def sizes(self, args: Any) -> dict[str, Any]:
        return {"output_gate": bool(getattr(args, "attention_output_gate", False))}

    @override
    def model_sizes(self, args: Any) -> dict[str, Any]:
        return {"kv_heads": query_groups(args), "head_size": args.kv_channels}

    @override
    def heads(self, config: Any, context: int) -> Heads | None:
        tensor, scale = config.tensor_model_parallel_size, config.softmax_scale
        return Heads(
            config.num_attention_heads // tensor // context,
            max(1, max(1, config.num_query_groups // tensor) // context),
            config.kv_channels,
            1 / math.sqrt(config.kv_channels) if scale is None else scale,
            config.params_dtype,
        )
