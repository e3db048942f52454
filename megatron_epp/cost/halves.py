"""Exchanges with experts that overlap with the experts' products, in two halves of a chunk's rows.

    exchange   dispatch 1 | dispatch 2 | combine 1 | combine 2       x seconds for all rows
    compute                 experts 1    experts 2                   c seconds for all rows

Without halves, a layer takes x + c. With halves, the first dispatch and the last combine remain
exposed, and the layer takes x / 2 + max(x / 2, c): min(x / 2, c) is hidden. Products are slower
while an exchange runs, weights are read once for each half, and the host issues products twice.
Small chunks therefore stay whole. Training applies the same rule (mcore/kinds/moe/halves.py).

Measured coefficients include what halves hide, so no more is subtracted from them.
"""

import math

from megatron_epp.cost.communication import expert_seconds
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import LayerCoefficients
from megatron_epp.ir import BACKWARDS, Kind

# Seconds of a product beside kernels of NCCL, relative to a product alone. An estimate, until two
# GPUs have measured it.
OVERLAP_SLOWDOWN = 1.15
# Host time of a layer of experts in halves, relative to that of a whole chunk, by counts of Python
# calls (tests/gpu/test_host_calls.py).
HOST_OF_HALVES = 1.6


def hidden_seconds(layout: StageLayout, of: LayerCoefficients, kind: Kind) -> float:
    """Return the seconds per token of communication that halves overlap in one layer's op."""
    if not layout.stacked_experts or kind not in (Kind.FORWARD, *BACKWARDS):
        return 0.0
    products = of.expert_seconds.get(kind, 0.0) / layout.shards
    return min(expert_seconds(layout, of) / 2 / OVERLAP_SLOWDOWN, products)


def repeated_seconds(layout: StageLayout, of: LayerCoefficients, kind: Kind) -> float:
    """Return the seconds per chunk in which one layer's op reads experts' weights again."""
    return of.expert_weight_seconds.get(kind, 0.0) / layout.ep


def gains(hidden: float, repeated: float, host: float, per_token: float, per_chunk: float) -> float:
    """Return the number of tokens from which a layer takes less time in halves; inf if never.

    Args:
        hidden: seconds per token of communication that halves overlap.
        repeated: seconds per chunk that halves add.
        host: seconds of the host to issue the layer for a whole chunk.
        per_token: seconds per token of the layer on the device, for a whole chunk.
        per_chunk: seconds per chunk of the layer on the device.
    """
    if not hidden:
        return math.inf
    not_of_host = (HOST_OF_HALVES * host - per_chunk) / per_token
    return max(repeated / hidden, not_of_host, 0.0)
