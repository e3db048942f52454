"""DeepSeek sparse attention in certificates."""

from typing import Any

from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)

from megatron_epp.certify.allowed_collectives import AllowedCollective, callers_of
from megatron_epp.layers import dsa
from megatron_epp.mcore.kinds.dsa.kind import DSAKind, asks_for_dsa, indexer_learns
from megatron_epp.mcore.kinds.mla.certificate import MLACertificate

# Of small models. So many heads that a score of exactly 0, which ties, needs all of them negative;
# so few keys that most queries have to choose, and drawn slices are shorter and longer.
MOST_HEADS, MOST_KEYS = 32, 7
AT_ONCE = 2000  # numbers of a block of rows: a few rows of a small model


class DSACertificate(MLACertificate):
    """Scaled down besides the latents' sizes are the indexer's channels, and its heads and chosen
    keys where they are many. In a small model nothing is turned by a Hadamard matrix, queries and
    keys alike, which the scores do not notice.
    """

    KIND = DSAKind()
    COLLECTIVES = (
        AllowedCollective(
            "attention of all heads",
            "TENSOR_MODEL_PARALLEL_GROUP",
            callers_of("megatron_epp.layers.dsa._target"),
            "what an indexer learns from; once per block of rows, in forward and in backward",
        ),
    )

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
        """Every key is chosen: of two that score about the same, rounding chooses."""
        return {"dsa_indexer_topk": small["seq_length"]} if "dsa_indexer_topk" in small else {}

    def small_words(self, args: Any) -> list[str]:
        learns = indexer_learns(args)
        taught = f"taught by {args.dsa_indexer_loss_coeff}" if learns else "not taught"
        of = " of the chosen keys" * bool(learns and args.dsa_indexer_use_sparse_loss)
        return [f"{words}, {taught}{of}" for words in self.KIND.words(args)]

    def shrink_blocks(self) -> None:
        dsa.AT_ONCE = dsa.GPU_AT_ONCE = AT_ONCE

    def adds_losses(self, holder: Any) -> bool:
        return indexer_learns(holder)

    def weigh_losses(self, scale: Any) -> None:
        DSAIndexerLossAutoScaler.set_loss_scale(scale)

    def forget_losses(self) -> None:
        DSAIndexerLossLoggingHelper.tracker.clear()
