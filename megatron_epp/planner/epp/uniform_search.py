"""Uniform recompute: all stages and chunks recompute the same number of layers in one mode."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.planner.epp.player import STRICT, Candidate, Player
from megatron_epp.planner.epp.preparation import PreparedChunking
from megatron_epp.planner.order.problem import left_layers
from megatron_epp.planner.recompute import offload
from megatron_epp.planner.recompute.choices import ladders

EVERY_CHUNK_ALIKE = ", recompute alike in all chunks"
ALIKE = (1.0, 0.75, 0.5, 0.25)  # fractions of the number of layers that uniform recompute requires


def uniform_recompute(
    player: Player, best: Candidate, others: Sequence[Candidate]
) -> Iterator[Candidate]:
    """Yield variants of ``best`` and ``others`` with uniform recompute.

    All stages and chunks recompute the same number of layers. Offloaded layers are not recomputed.
    The number is the least with which the candidate's chunks fit in memory, in 1F1B order and in
    the candidate's own order. Smaller numbers are tried too; forwards may then wait for memory. The
    iterator ends early if no effort is left.
    """
    for candidate in (best, *others):
        steps = "".join(modes[1:] for modes in ladders(player.cost, candidate.prepared.loads))
        for mode in dict.fromkeys(steps):
            named = dataclasses.replace(candidate, name=f"{candidate.name}{EVERY_CHUNK_ALIKE}")
            by_limit = _least_uniform(
                player, named, mode, lambda prepared, of: player.play(prepared, STRICT, of.name)
            )
            own = _least_uniform(player, named, mode, player.replay)
            if by_limit is None or own is None:
                return
            yield by_limit
            yield own
            least = _most_layers(by_limit.prepared.counts, mode)
            for layers in sorted({math.ceil(least * fraction) for fraction in ALIKE}):
                played = player.recomputed(named, _uniform(player, candidate, mode, layers))
                if played is None:
                    return
                yield played


def _least_uniform(
    player: Player,
    candidate: Candidate,
    mode: str,
    play: Callable[[PreparedChunking, Candidate], Candidate],
) -> Candidate | None:
    """Return ``candidate`` with recompute ``mode`` for the least number of layers that fits.

    ``play`` schedules the candidate for each number that is tried. If no number fits, all layers
    have the mode. Return None if no effort is left.
    """
    low, high = 1, max(player.cost.layout.layers)
    best: Candidate | None = None
    while low <= high:
        middle = (low + high) // 2
        counts = _uniform(player, candidate, mode, middle)
        prepared = player.recounted(candidate.prepared, counts)
        if prepared is None:
            return None
        played = play(prepared, candidate)
        if best is None or played.over_bytes <= 0 or best.over_bytes > 0:
            best = played
        if played.over_bytes > 0:
            low = middle + 1
        else:
            high = middle - 1
    return best


def _uniform(player: Player, candidate: Candidate, mode: str, layers: int) -> Counts:
    offloaded = offload.offload_of(candidate.prepared.counts)
    left = left_layers(player.cost, offloaded, candidate.prepared.chunking.count)
    return {**offloaded, **player.first_layers(left, mode, layers)}


def _most_layers(counts: Counts, mode: str) -> int:
    """Return the maximum over stages and chunks of the number of layers with ``mode``."""
    grids = [grid for choice, grid in counts.items() if choice[1] == mode]
    return int(np.max(np.sum(grids, axis=0))) if grids else 0
