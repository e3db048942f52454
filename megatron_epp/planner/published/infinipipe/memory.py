"""InfiniPipe's memory model of a chunk (eqs 5 to 10).

In this model, a slice or hybrid chunk holds K/V gradients for all its tokens from its forward on.
The simulator uses exact rules instead (ir.rules, cost.memory).
"""

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.cost.profile import LayerCoefficients
from megatron_epp.ir import FULL, KEEP


def paper_moves(cost: Cost, loads: Loads) -> np.ndarray:
    """Return the bytes I_p[k] of eq. 19: [F or B, allocated or freed, stages, chunks]."""
    profile = cost.layout.profile
    tokens = loads.tokens / cost.layout.shards
    held = cost.layout.over_stages([_held(cost, each, loads) for each in cost.layout.coefficients])
    held[0] += profile.first_bytes.per_token * tokens
    held[-1] += profile.last_bytes.per_token * tokens
    moves = np.zeros((2, 2, cost.layout.stages, loads.chunks))
    moves[0, 0] = moves[1, 1] = held
    return moves


def paper_freed(cost: Cost, loads: Loads) -> np.ndarray:
    """Return F[k], the bytes [stages, chunks] that one recomputed layer frees.

    A slice's K and V are not freed, because later slices attend to them (eq. 9).
    """
    rows = [_freed(cost, each, loads) for each in cost.layout.coefficients]
    if len(rows) == 1:
        return np.tile(rows[0], (cost.layout.stages, 1))
    # The paper has one kind of layer; a stage with several kinds uses its average layer.
    return cost.layout.over_stages(rows) / np.maximum(np.array(cost.layout.layers), 1)[:, None]


def _held(cost: Cost, of: LayerCoefficients, loads: Loads) -> np.ndarray:
    """Return the bytes [chunks] of one layer: activations, and for slices also cached K and V."""
    tokens = loads.tokens / cost.layout.shards
    carries = loads.document >= 0  # 1 - I_k, as the text defines it
    kept = of.saved_bytes[KEEP].per_token
    if of.border_bytes:  # a state, independent of the tokens
        return kept * tokens + (loads.later >= 0) * of.border_bytes / cost.memory.kv_shards(of)
    if of.window or of.kv_replicated:
        return kept * tokens + carries * _cached_kv(cost, of, loads)
    return (kept + carries * of.kv_bytes_per_token) * tokens


def _cached_kv(cost: Cost, of: LayerCoefficients, loads: Loads) -> np.ndarray:
    """Return the K/V bytes [chunks] of one layer: for all tokens, or those in a sliding window."""
    tokens = np.minimum(loads.tokens, of.window - 1) if of.window else loads.tokens
    return of.kv_bytes_per_token * tokens / cost.memory.kv_shards(of)


def _freed(cost: Cost, of: LayerCoefficients, loads: Loads) -> np.ndarray:
    """Return the bytes [chunks] that one recomputed layer frees."""
    # The K and V of a slice are not freed. However, a window caches a copy of its last tokens, and
    # cached latents are not saved activations.
    carries = (loads.document >= 0) & (not (of.window or of.kv_replicated))
    per_token = (
        of.saved_bytes[KEEP].per_token
        - of.saved_bytes[FULL].per_token
        - carries * of.kv_bytes_per_token
    )
    return np.maximum(per_token, 0.0) * loads.tokens / cost.layout.shards
