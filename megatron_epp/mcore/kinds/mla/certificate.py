"""MLA in certificates."""

from math import lcm
from typing import Any, override

from megatron_epp.mcore.kinds.base import LayerKind
from megatron_epp.mcore.kinds.certificate_base import LayerCertificate
from megatron_epp.mcore.kinds.mla.kind import MLAKind

LEAST_RANK = 8


class MLACertificate(LayerCertificate):
    """Certificate of MLA layers.

    The small model has smaller head sizes and smaller ranks of the latents. It has a latent of the
    queries if the full model has one. The ratios between the sizes of Q, K and V heads do not
    change. The ratio of ranks to the hidden size does not change either, but a rank is at least 8.
    """

    KIND: LayerKind = MLAKind()

    @override
    def read_pattern(self, args: Any, symbols: str) -> None:
        args.multi_latent_attention |= self.KIND.SYMBOL in symbols

    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        """Return MLA sizes of the small model; ``head_size`` excludes the rotary channels."""
        if not args.multi_latent_attention:
            return {}
        self.KIND.require(args, tp)
        block = min(step, 32)  # channels that ranks do not split need no full blocks
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

    @override
    def small_words(self, args: Any) -> list[str]:
        if not args.multi_latent_attention:
            return []
        of_queries = "none" if args.q_lora_rank is None else args.q_lora_rank
        heads = f"heads of {args.qk_head_dim} + {args.qk_pos_emb_head_dim} and {args.v_head_dim}"
        return [f"latents of {args.kv_lora_rank}, of queries {of_queries}", heads]
