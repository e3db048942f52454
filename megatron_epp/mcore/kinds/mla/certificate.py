"""Multi-latent attention in certificates."""

from math import lcm
from typing import Any

from megatron_epp.layers import mla
from megatron_epp.mcore.kinds.base import LayerKind
from megatron_epp.mcore.kinds.certificate_base import LayerCertificate
from megatron_epp.mcore.kinds.mla.kind import MLAKind

LEAST_RANK = 8
BLOCK = 7  # tokens of a context that are expanded at a time: as small as the contexts are


class MLACertificate(LayerCertificate):
    """Scaled down are sizes and ranks. Kept: whether queries have a latent, sizes of a head's parts
    over one another, so that Q and K differ from V where they do, ranks over the hidden size, at
    least 8.
    """

    KIND: LayerKind = MLAKind()

    def read_pattern(self, args: Any, symbols: str) -> None:
        args.multi_latent_attention |= self.KIND.SYMBOL in symbols

    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        """``head_size``: of the part of Q and K that is not rotated."""
        if not args.multi_latent_attention:
            return {}
        self.KIND.require(args, tp)
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

    def shrink_blocks(self) -> None:
        mla.BLOCK = BLOCK
