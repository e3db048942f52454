"""DSA in certificates."""

from typing import Any, override

from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)

from megatron_epp.layers import dsa
from megatron_epp.mcore.kinds.dsa.kind import DSAKind, asks_for_dsa, indexer_learns
from megatron_epp.mcore.kinds.mla.certificate import MLACertificate

# For small models. With many heads, tied scores of exactly 0 (all heads negative) are unlikely.
# With few keys, most queries have to choose keys, and slices are shorter and longer than top-k.
MOST_HEADS, MOST_KEYS = 32, 7
AT_ONCE = 2000  # elements of a block of rows: a few rows of a small model


class DSACertificate(MLACertificate):
    """Certificate of DSA layers.

    The small model has the sizes of MLA's small model. Its indexer has fewer channels, heads and
    chosen keys. The small model does not apply the Hadamard matrix, which does not change scores:
    it rotates queries and keys equally.
    """

    KIND = DSAKind()

    @override
    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        if not asks_for_dsa(args):
            return {}
        self.KIND.require(args, tp)
        mla_sizes = super().small(args, hidden, tp, head_size, step)
        rotary = mla_sizes["qk_pos_emb_head_dim"]
        wanted = round(args.dsa_indexer_head_dim / args.qk_pos_emb_head_dim * rotary)
        return {
            "dsa_indexer_n_heads": min(args.dsa_indexer_n_heads, MOST_HEADS),
            "dsa_indexer_head_dim": max(rotary, wanted),
            "dsa_indexer_topk": min(args.dsa_indexer_topk, MOST_KEYS),
            "dsa_indexer_rotate_activation": False,
        }

    def without_ties(self, small: Any) -> dict[str, Any]:
        """Return a top-k that chooses all keys: rounding may decide between nearly equal scores."""
        return {"dsa_indexer_topk": small["seq_length"]} if "dsa_indexer_topk" in small else {}

    @override
    def small_words(self, args: Any) -> list[str]:
        learns = indexer_learns(args)
        taught = f"taught by {args.dsa_indexer_loss_coeff}" if learns else "not taught"
        of = " of the chosen keys" * bool(learns and args.dsa_indexer_use_sparse_loss)
        return [f"{words}, {taught}{of}" for words in self.KIND.words(args)]

    @override
    def shrink_blocks(self) -> None:
        dsa.AT_ONCE = dsa.GPU_AT_ONCE = AT_ONCE

    @override
    def weigh_losses(self, scale: Any) -> None:
        DSAIndexerLossAutoScaler.set_loss_scale(scale)

    @override
    def forget_losses(self) -> None:
        DSAIndexerLossLoggingHelper.tracker.clear()
