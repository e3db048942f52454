"""Parts of layers by Megatron's flags: which layers have each, and its sizes.

A class for every class of :mod:`megatron_epp.cost.kinds`, which says what the part takes.
"""

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from megatron_epp.mcore.model.hybrid.pattern import (
    ATTENTION,
    EXPERTS,
    LATENT,
    MLP,
    letters_of_layers,
)


class FlaggedPart:
    """A part of layers, by Megatron's parsed ``args``.

    LETTERS   of a HybridModel's pattern, for layers that have it
    ABSENT    fields of LayerShape of a layer without it
    """

    LETTERS: ClassVar[str] = ""
    ABSENT: ClassVar[dict[str, Any]] = {}

    @classmethod
    def layers(cls, args: Any) -> tuple[bool, ...]:
        """Mask of the layers that have it: those of its letters; all of a model of whole layers."""
        pattern = getattr(args, "hybrid_layer_pattern", None)
        by_letter = tuple(letter in cls.LETTERS for letter in letters_of_layers(pattern or ""))
        return by_letter or (True,) * args.num_layers

    @classmethod
    def sizes(cls, args: Any) -> dict[str, Any]:
        """Fields of LayerShape of a layer that has it."""
        return {}

    @classmethod
    def words(cls, args: Any) -> list[str]:
        """Words that tell a profile of such a model from others'."""
        return []


class FlaggedAttention(FlaggedPart):
    """Attention of any sort: in all layers but the MLPs and experts of a HybridModel."""

    LETTERS = ATTENTION + LATENT
    ABSENT: ClassVar = {"attention": False}


class FlaggedLatents(FlaggedAttention):
    """--multi-latent-attention."""

    ABSENT: ClassVar = {}

    @classmethod
    def layers(cls, args: Any) -> tuple[bool, ...]:
        if not getattr(args, "multi_latent_attention", False):
            return (False,) * args.num_layers
        return super().layers(args)

    @classmethod
    def sizes(cls, args: Any) -> dict[str, Any]:
        return {
            "kv_rank": args.kv_lora_rank,
            "query_rank": args.q_lora_rank or 0,
            "rotary_size": args.qk_pos_emb_head_dim,
            "value_size": args.v_head_dim,
            "carries_latents": getattr(args, "epp_mla_keeps", "latents") != "expanded",
        }

    @classmethod
    def words(cls, args: Any) -> list[str]:
        if not args.multi_latent_attention:
            return []
        sizes = f"{args.qk_head_dim} + {args.qk_pos_emb_head_dim} and {args.v_head_dim}"
        ranks = f"latents {args.kv_lora_rank}, of queries {args.q_lora_rank or 'none'}"
        return [f"{ranks}, heads of {sizes}, keeps {args.epp_mla_keeps}"]


class FlaggedMlp(FlaggedPart):
    """An MLP or experts: in all layers but those of attention of a HybridModel."""

    LETTERS = MLP + EXPERTS
    ABSENT: ClassVar = {"mlp": False}


class FlaggedExperts(FlaggedPart):
    """--num-experts, --moe-layer-freq or the pattern."""

    LETTERS = EXPERTS

    @classmethod
    def layers(cls, args: Any) -> tuple[bool, ...]:
        if not args.num_experts:
            return (False,) * args.num_layers
        every = args.moe_layer_freq
        if getattr(args, "hybrid_layer_pattern", None):
            return super().layers(args)
        if isinstance(every, int):
            return tuple(layer % every == 0 for layer in range(args.num_layers))
        return of_all_layers("--moe-layer-freq", every, args.num_layers)

    @classmethod
    def sizes(cls, args: Any) -> dict[str, Any]:
        return {
            "experts": args.num_experts,
            "active_experts": args.moe_router_topk,
            "expert_hidden": args.moe_ffn_hidden_size or args.ffn_hidden_size,
            "shared_hidden": args.moe_shared_expert_intermediate_size or 0,
        }

    @classmethod
    def words(cls, args: Any) -> list[str]:
        if not args.num_experts:
            return []
        hidden = args.moe_ffn_hidden_size or args.ffn_hidden_size
        words = [f"{args.moe_router_topk} of {args.num_experts} experts of {hidden}"]
        if args.moe_shared_expert_intermediate_size:
            words.append(f"shared {args.moe_shared_expert_intermediate_size}")
        if args.expert_model_parallel_size > 1:
            words.append(f"ep {args.expert_model_parallel_size}")
        if args.expert_tensor_parallel_size > 1:
            words.append(f"etp {args.expert_tensor_parallel_size}")
        return [*words, f"exchanged by {args.moe_token_dispatcher_type}"]


class FlaggedWindow(FlaggedAttention):
    """--window-size, --window-attn-skip-freq, of layers with attention."""

    ABSENT: ClassVar = {}

    @classmethod
    def windowed(cls, args: Any) -> tuple[bool, ...]:
        """Mask of the layers that the flags speak of, with attention or without."""
        if not getattr(args, "window_size", None):
            return (False,) * args.num_layers
        skip = args.window_attn_skip_freq
        if skip is None:
            return (True,) * args.num_layers
        if isinstance(skip, int):
            return tuple(number % skip != 0 for number in range(1, args.num_layers + 1))
        return of_all_layers("--window-attn-skip-freq", skip, args.num_layers)

    @classmethod
    def layers(cls, args: Any) -> tuple[bool, ...]:
        attention = super().layers(args)
        return tuple(a and b for a, b in zip(attention, cls.windowed(args), strict=True))

    @classmethod
    def sizes(cls, args: Any) -> dict[str, Any]:
        return {"window": args.window_size[0] + 1}

    @classmethod
    def words(cls, args: Any) -> list[str]:
        return [f"window {args.window_size[0]}"] if args.window_size else []


FLAGGED_PARTS: tuple[type[FlaggedPart], ...] = (
    FlaggedAttention,
    FlaggedMlp,
    FlaggedLatents,
    FlaggedExperts,
    FlaggedWindow,
)


def part_sizes(args: Any, there: Collection[type[FlaggedPart]]) -> dict[str, Any]:
    """Fields of LayerShape of a layer that has the parts ``there``."""
    found: dict[str, Any] = {}
    for part in FLAGGED_PARTS:
        found |= part.sizes(args) if part in there else part.ABSENT
    return found


def of_all_layers(flag: str, given: Sequence[int], layers: int) -> tuple[bool, ...]:
    """Mask of all layers as ``flag`` gives it. ValueError: it speaks of more or of fewer."""
    if len(given) != layers:
        raise ValueError(f"{flag}: {len(given)} layers; expected --num-layers, {layers}")
    return tuple(map(bool, given))
