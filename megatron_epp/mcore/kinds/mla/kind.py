"""Multi-latent attention (MLA) in Megatron's flags."""

import math
from typing import Any, ClassVar, override

from megatron_epp.cost.kinds.mla import MLAPart
from megatron_epp.layers.attention.layer_attention import Heads
from megatron_epp.mcore.kinds.attention.kind import (
    ODD_ROTARY,
    AttentionKind,
    derived_symbols,
    odd_rotary,
)
from megatron_epp.mcore.kinds.limit import Limit
from megatron_epp.mcore.kinds.ssm.kind import GatedDeltaNetKind


class MLAKind(AttentionKind):
    """MLA (--multi-latent-attention).

    The latents and the rotary key are equal on all tensor-parallel ranks.
    """

    PRICED, NAME, SYMBOL = MLAPart, "latent attention", "+"
    SINCE = (0, 19)
    ABSENT: ClassVar = {}
    STACK = "mla_layer"
    FLAGS: ClassVar = {"multi_latent_attention": False}
    LIMITS: tuple[Limit, ...] = (
        Limit(
            "MLA: one down-projection for both latents, cached latents (--mla-down-proj-fusion, "
            "--cache-mla-latents)",
            "leave them out: the first saves only one kernel launch per chunk, and the second is "
            "for inference",
            "mla_down_proj_fusion cache_mla_latents",
        ),
    )

    def layers(self, args: Any) -> tuple[bool, ...]:
        """Return the mask of MLA layers; a GPTModel with another attention variant has none."""
        here = bool(getattr(args, "multi_latent_attention", False))
        if not getattr(args, "hybrid_layer_pattern", None):
            variant = getattr(args, "experimental_attention_variant", None)
            here = here and variant in (None, *GatedDeltaNetKind.VARIANTS)
        return super().layers(args) if here else (False,) * args.num_layers

    @override
    def sizes(self, args: Any) -> dict[str, Any]:
        return {
            "kv_rank": args.kv_lora_rank,
            "query_rank": args.q_lora_rank or 0,
            "rotary_size": args.qk_pos_emb_head_dim,
            "value_size": args.v_head_dim,
        }

    @override
    def model_sizes(self, args: Any) -> dict[str, Any]:
        if not getattr(args, "multi_latent_attention", False):
            return {}
        return {"kv_heads": args.num_attention_heads, "head_size": args.qk_head_dim}

    def defaults(self, wanted: Any) -> dict[str, Any]:
        """Disable fused RoPE, because Megatron's fused kernel for MLA does not accept positions."""
        return {"apply_rope_fusion": False} if wanted.multi_latent_attention else {}

    @override
    def words(self, args: Any) -> list[str]:
        if not args.multi_latent_attention:
            return []
        sizes = f"{args.qk_head_dim} + {args.qk_pos_emb_head_dim} and {args.v_head_dim}"
        ranks = f"latents {args.kv_lora_rank}, of queries {args.q_lora_rank or 'none'}"
        return [f"{ranks}, heads of {sizes}"]

    def require(self, args: Any, tp: int) -> None:
        """Raise a ValueError if sizes are invalid, or if local linears do not divide by ``tp``."""
        if not args.multi_latent_attention:
            return
        names = ["kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"]
        names += ["q_lora_rank"] * (args.q_lora_rank is not None)
        for name in names:
            if getattr(args, name) < 1:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} {getattr(args, name)}: expected at least 1")
        rotary, both = args.qk_pos_emb_head_dim, args.kv_lora_rank + args.qk_pos_emb_head_dim
        if odd_rotary(args, rotary):
            raise ValueError(f"--qk-pos-emb-head-dim {rotary}: {ODD_ROTARY}")
        if args.transformer_impl != "local":  # TE computes all channels on every rank
            return
        over = f"over --tensor-model-parallel-size {tp}; expected a multiple of it"
        if both % tp:
            raise ValueError(
                f"--kv-lora-rank {args.kv_lora_rank} and --qk-pos-emb-head-dim {rotary}: {both} "
                f"channels do not divide {over}"
            )
        if (args.q_lora_rank or 0) % tp:
            raise ValueError(f"--q-lora-rank {args.q_lora_rank}: does not divide {over}")

    @override
    def refuse(self, args: Any) -> None:
        if getattr(args, "multi_latent_attention", False):
            self.require(args, args.tensor_model_parallel_size)

    @override
    def unfit_pattern(self, args: Any, symbols: str) -> str | None:
        other = next((symbol for symbol in derived_symbols(MLAKind) if symbol in symbols), None)
        if other is None or AttentionKind.SYMBOL not in symbols:
            return None
        return (
            f"attention ({AttentionKind.SYMBOL}) and latent attention ({other}) in one model; "
            "expected one of the two"
        )

    @override
    def heads(self, config: Any, context: int) -> Heads | None:
        if not getattr(config, "multi_latent_attention", False):
            return None
        heads = config.num_attention_heads // config.tensor_model_parallel_size // context
        size = config.qk_head_dim + config.qk_pos_emb_head_dim
        return Heads(heads, heads, size, mla_scale(config), config.params_dtype, config.v_head_dim)


def mla_scale(config: Any) -> float:
    """Return the softmax scale of MLA, including YaRN's factor for longer contexts.

    As in Megatron's MultiLatentAttention, the factor applies with any type of rotary embedding.
    """
    from megatron.core.models.common.embeddings import _yarn_get_mscale

    stretch = _yarn_get_mscale(config.rotary_scaling_factor, config.mscale_all_dim)
    return stretch * stretch / math.sqrt(config.qk_head_dim + config.qk_pos_emb_head_dim)
