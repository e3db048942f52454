"""Cost of splitting a backward, from the times of the full backward and its halves.

I and W together take longer than B: by a fraction of B and by a constant per chunk. W takes seconds
in proportion to tokens and half of this constant; I takes the remaining seconds.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megatron_epp.cost.analytic import in_input
from megatron_epp.cost.fitting.fit import line_above
from megatron_epp.cost.profile import Bytes, Profile, Seconds, Workspace
from megatron_epp.ir import Kind

SMALL_TOKENS = 16  # of a chunk whose times are overhead only


@dataclass(frozen=True, slots=True)
class SplitSeconds:
    """Time and bytes of a chunk's B, I and W.

    Bytes are 0 if only times were measured; times are 0 if only bytes were measured.

    Attributes:
        end: whether LM head and loss were measured; otherwise one layer.
        tokens: tokens of the chunk.
        whole: seconds of B.
        input: seconds of I.
        weight: seconds of W.
        input_bytes: peak bytes of I in addition to the bytes held before I.
        weight_input_bytes: bytes held from I to W.
    """

    end: bool
    tokens: int
    whole: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    input_bytes: int = 0
    weight_input_bytes: int = 0


def with_split(profile: Profile, splits: Sequence[SplitSeconds]) -> Profile:
    """Return ``profile``, whose B was measured, with I, W and their bytes from ``splits``.

    ``splits`` must contain times of one layer for SMALL_TOKENS and for more tokens, and bytes.

    If no bytes are held from I to W, no linear of the layer defers its weight gradient. Then I
    takes as long as B, and W takes no time.
    """
    timed = [split for split in splits if split.whole]
    small = [s for s in timed if not s.end and s.tokens == SMALL_TOKENS]
    large = [s for s in timed if not s.end and s.tokens != SMALL_TOKENS]
    # At least 0: a measured gain from splitting is noise.
    per_chunk = max(0.0, median(s.input + s.weight - s.whole for s in small))
    price = max(0.0, median((s.input + s.weight - s.whole - per_chunk) / s.whole for s in large))
    per_token = median((s.weight - per_chunk / 2) / s.tokens for s in large)
    layer, last = dict(profile.layer_seconds), dict(profile.last_seconds)
    if per_token <= 0:  # on a busy host: keep W's fraction of B
        per_token = layer[Kind.WEIGHT].per_token
    weight = layer[Kind.WEIGHT] = Seconds(per_token=per_token, per_chunk=per_chunk / 2)
    layer[Kind.INPUT] = _rest(layer[Kind.BACKWARD], 1 + price, per_chunk, weight)
    host = profile.host_seconds
    if not any(s.weight_input_bytes for s in splits if not s.end):
        layer |= {Kind.INPUT: layer[Kind.BACKWARD], Kind.WEIGHT: Seconds()}
        host = in_input(host)
    ends = [s for s in timed if s.end]
    if ends:
        fraction = median(s.weight / s.whole for s in ends)
        backward = last[Kind.BACKWARD]
        last[Kind.WEIGHT] = Seconds(per_token=fraction * backward.per_token)
        last[Kind.INPUT] = _rest(backward, 1.0, 0.0, last[Kind.WEIGHT])
    weighed = [s for s in splits if not s.whole]
    # Bytes per token come from the largest chunk, where constants matter least.
    largest = max(s.tokens for s in weighed)
    between, after = (
        max(
            (
                s.weight_input_bytes / s.tokens
                for s in weighed
                if s.end is end and s.tokens == largest
            ),
            default=0.0,
        )
        for end in (False, True)
    )
    points = [(s.tokens, s.input_bytes) for s in weighed if not s.end]
    while_i, constant = line_above(points, goes_on=True)
    unsplit = profile.workspace_bytes[Kind.BACKWARD]
    return dataclasses.replace(
        profile,
        layer_seconds=layer,
        last_seconds=last,
        host_seconds=host,
        weight_input_bytes=Bytes(between, between),
        last_weight_input_bytes=Bytes(after, after),
        workspace_bytes={
            **profile.workspace_bytes,
            Kind.INPUT: Workspace(while_i, while_i, unsplit.per_context_token, constant),
        },
    )


def _rest(total: Seconds, factor: float, more: float, part: Seconds) -> Seconds:
    """Return ``factor`` times ``total`` plus ``more`` per chunk, minus ``part``."""
    return Seconds(
        max(0.0, factor * total.per_token - part.per_token),
        factor * total.per_pair,
        max(0.0, factor * total.per_chunk + more - part.per_chunk),
    )
