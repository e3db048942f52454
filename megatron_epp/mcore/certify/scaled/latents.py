"""Latent attention, scaled down.

Kept: whether queries have a latent, sizes of a head's parts over one another, so that Q and K
differ from V where they do, ranks over the hidden size, at least 8. Scaled down: sizes, ranks.
Every tensor-parallel rank makes the same part of a latent and of the rotary key.
"""

from argparse import Namespace
from math import lcm
from typing import Any

from megatron_epp.mcore.refusals import require_whole_latents

LEAST_RANK = 8


def small_latents(args: Namespace, hidden: int, tp: int, head_size: int) -> dict[str, Any]:
    """The values that make the latents of Megatron's parsed ``args`` small; ``head_size``: of the
    part of Q and K that is not rotated. ValueError: one line."""
    if not args.multi_latent_attention:
        return {}
    require_whole_latents(args, tp)
    turned, rotary = args.qk_pos_emb_head_dim, lcm(2, tp)

    def rank(value: int) -> int:
        return -(-max(LEAST_RANK, round(value / args.hidden_size * hidden)) // tp) * tp

    changed = {
        "kv_lora_rank": rank(args.kv_lora_rank),
        "qk_head_dim": head_size,
        "qk_pos_emb_head_dim": max(1, round(turned / args.qk_head_dim * head_size / rotary))
        * rotary,
        "v_head_dim": max(1, round(args.v_head_dim / args.qk_head_dim * head_size)),
    }
    if args.q_lora_rank is not None:
        changed["q_lora_rank"] = rank(args.q_lora_rank)
    return changed
