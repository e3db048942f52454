"""Multi-latent attention, in Megatron."""

from collections.abc import Iterable
from math import lcm
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_epp.cost.kinds.latents import LatentPart
from megatron_epp.mcore.flags.config import AUTO, EXPANDED, LATENTS
from megatron_epp.mcore.model.kinds.base import LayerPlace
from megatron_epp.mcore.model.kinds.self_attention import SPARSE, MegatronAttention
from megatron_epp.mcore.model.limit import Limit, given

if TYPE_CHECKING:
    from megatron_epp.cost.profile import LayerFigures

LEAST_RANK = 8


class MegatronLatents(MegatronAttention):
    """--multi-latent-attention.

    Scaled down are sizes and ranks. Kept: whether queries have a latent, sizes of a head's parts
    over one another, so that Q and K differ from V where they do, ranks over the hidden size, at
    least 8. Every tensor-parallel rank makes the same part of a latent and of the rotary key.
    """

    PRICED, NAME, LETTER = LatentPart, "latent attention", "+"
    ABSENT: ClassVar = {}
    STACK = "mla_layer"
    FLAGS: ClassVar = {"multi_latent_attention": False}
    CHOICE: str = "epp_mla_keeps"
    VALUES: tuple[str, ...] = (EXPANDED, LATENTS)
    LIMITS: tuple[Limit, ...] = (
        Limit(
            "one product for both latents, and latents cached (--mla-down-proj-fusion, "
            "--cache-mla-latents)",
            "leave them out: the first saves one launch a chunk, the second is for inference",
            given("mla_down_proj_fusion", "cache_mla_latents"),
        ),
    )

    def layers(self, args: Any) -> tuple[bool, ...]:
        """But those of a GPTModel with sparse attention, which attends in latents otherwise."""
        here = bool(getattr(args, "multi_latent_attention", False))
        if not getattr(args, "hybrid_layer_pattern", None):
            here = here and getattr(args, "experimental_attention_variant", None) != SPARSE
        return super().layers(args) if here else (False,) * args.num_layers

    def sizes(self, args: Any) -> dict[str, Any]:
        return {
            "kv_rank": args.kv_lora_rank,
            "query_rank": args.q_lora_rank or 0,
            "rotary_size": args.qk_pos_emb_head_dim,
            "value_size": args.v_head_dim,
            "carries_latents": getattr(args, self.CHOICE, LATENTS) != EXPANDED,
        }

    def model_sizes(self, args: Any) -> dict[str, Any]:
        if not getattr(args, "multi_latent_attention", False):
            return {}
        return {"kv_heads": args.num_attention_heads, "head_size": args.qk_head_dim}

    def defaults(self, wanted: Any) -> dict[str, Any]:
        """No fused rotary embedding: Megatron's for latents is YaRN's, and takes no rows of other
        positions."""
        return {"apply_rope_fusion": False} if wanted.multi_latent_attention else {}

    def words(self, args: Any) -> list[str]:
        if not args.multi_latent_attention:
            return []
        sizes = f"{args.qk_head_dim} + {args.qk_pos_emb_head_dim} and {args.v_head_dim}"
        ranks = f"latents {args.kv_lora_rank}, of queries {args.q_lora_rank or 'none'}"
        return [f"{ranks}, heads of {sizes}, keeps {args.epp_mla_keeps}"]

    def require(self, args: Any, tp: int) -> None:
        """Megatron's own linears must make as many channels on each of ``tp`` ranks."""
        if not args.multi_latent_attention:
            return
        names = ["kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"]
        names += ["q_lora_rank"] * (args.q_lora_rank is not None)
        for name in names:
            if getattr(args, name) < 1:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} {getattr(args, name)}: expected at least 1")
        rotary, both = args.qk_pos_emb_head_dim, args.kv_lora_rank + args.qk_pos_emb_head_dim
        if rotary % 2:
            raise ValueError(f"--qk-pos-emb-head-dim {rotary}: expected a multiple of 2")
        if args.transformer_impl != "local":  # Transformer Engine's make all of them on every rank
            return
        over = f"over --tensor-model-parallel-size {tp}; expected a multiple of it"
        if both % tp:
            raise ValueError(
                f"--kv-lora-rank {args.kv_lora_rank} and --qk-pos-emb-head-dim {rotary}: {both} "
                f"channels do not divide {over}"
            )
        if (args.q_lora_rank or 0) % tp:
            raise ValueError(f"--q-lora-rank {args.q_lora_rank}: does not divide {over}")

    def refuse(self, args: Any) -> None:
        if getattr(args, "multi_latent_attention", False):
            self.require(args, args.tensor_model_parallel_size)
        elif (keeps := getattr(args, "epp_mla_keeps", AUTO)) != AUTO:
            raise ValueError(
                f"--epp-mla-keeps {keeps}: the model has no multi-latent attention; leave the flag "
                "out"
            )

    def unfit_pattern(self, args: Any, letters: str) -> str | None:
        other = next((letter for letter in (self.LETTER, "D") if letter in letters), None)
        if other is None or MegatronAttention.LETTER not in letters:
            return None
        return (
            f"attention ({MegatronAttention.LETTER}) and latent attention ({other}) in one model; "
            "expected one of the two"
        )

    def read_pattern(self, args: Any, letters: str) -> None:
        args.multi_latent_attention |= self.LETTER in letters

    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        """``head_size``: of the part of Q and K that is not rotated."""
        if not args.multi_latent_attention:
            return {}
        self.require(args, tp)
        block = min(step, 32)  # what is no rank's part need not be whole blocks
        rotary, latent = lcm(2, tp, block), lcm(tp, block)

        def rank(value: int) -> int:
            wanted = max(LEAST_RANK, round(value / args.hidden_size * hidden))
            return -(-wanted // latent) * latent

        def part(size: int, step: int) -> int:
            return max(1, round(size / args.qk_head_dim * head_size / step)) * step

        changed = {
            "kv_lora_rank": rank(args.kv_lora_rank),
            "qk_head_dim": head_size,
            "qk_pos_emb_head_dim": part(args.qk_pos_emb_head_dim, rotary),
            "v_head_dim": part(args.v_head_dim, max(1, step // 4)),
        }
        if args.q_lora_rank is not None:
            changed["q_lora_rank"] = rank(args.q_lora_rank)
        return changed

    def small_words(self, args: Any) -> list[str]:
        if not args.multi_latent_attention:
            return []
        of_queries = "none" if args.q_lora_rank is None else args.q_lora_rank
        heads = f"heads of {args.qk_head_dim} + {args.qk_pos_emb_head_dim} and {args.v_head_dim}"
        return [f"latents of {args.kv_lora_rank}, of queries {of_queries}", heads]

    def excluded(self, model: Any, attention: Any) -> dict[str, str]:
        from megatron_epp.mcore.model.latent_attention import why_expanded

        reason = why_expanded(model, attention)
        return {} if reason is None else {LATENTS: reason}

    def measured_with(self, figures: Iterable["LayerFigures"]) -> str:
        return LATENTS if any(each.kv_replicated for each in figures) else EXPANDED

    def settle(self, attention: Any, value: str) -> None:
        attention.latents = value == LATENTS

    def local_layer(self, config: Any) -> Any:
        from megatron_epp.mcore.model.local_layers import attention_alone

        return attention_alone(config, latents=True)

    def mend_local(self, layer: Any, config: Any) -> None:
        from megatron_epp.mcore.model.local_layers import mend_latents

        mend_latents(layer, config)

    def heads(self, config: Any, context: int) -> Any:
        from megatron_epp.mcore.model.latent_attention import latent_heads

        there = getattr(config, "multi_latent_attention", False)
        return latent_heads(config, context) if there else None

    def holds(self, module: Any) -> bool:
        from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

        return isinstance(module, MultiLatentAttention)

    def install(self, place: LayerPlace) -> None:
        from megatron_epp.mcore.model.latent_attention import install_latents

        install_latents(place)

    def elastic(self, layer: Any) -> Any:
        return layer.self_attention._run_core_attention.__self__

    def kept_shapes(self, layer: Any, context: int) -> tuple[tuple[int, ...], ...]:
        config, turned = layer.config, layer.config.qk_pos_emb_head_dim
        if self.elastic(layer).attention.latents:
            return (context, 1, config.kv_lora_rank), (context, 1, turned)
        ranks = config.tensor_model_parallel_size * config.context_parallel_size
        heads = config.num_attention_heads // ranks
        return (context, heads, config.qk_head_dim + turned), (context, heads, config.v_head_dim)
