"""AdaPtis (arXiv 2509.23722): partition, placement and schedule of a pipeline, searched together.

As published: the sequences of a batch are packed to the context into micro-batches, which are not
cut. A performance model says what every (partition, placement, schedule) takes; a generator moves
layers away from the stage that is the bottleneck, tries placements of one or two stages on a
device, and orders F, B and W by a list schedule within memory. Ours: our cost model, list schedule
and its few warm-ups, and at most ROUNDS moves of a layer. What the paper does not say in public is
filled in so; nothing of it can be run.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.choose.partition import fastest_layers
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.fixed_size import packed_chunks
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.problem import loads_of, rates_of
from megatron_epp.planner.result import SimulatedPipeline
from megatron_epp.planner.virtual.pipeline import (
    PlacementName,
    Setup,
    TimedSetup,
    best_of,
    placement,
    result,
    warm_ups,
)

ROUNDS = 12  # moves of a layer that are tried for every placement
PLACEMENTS: tuple[PlacementName, ...] = ("one", "interleaved", "wave")


def plan(lengths: Sequence[int], cost: Cost, options: Options) -> SimulatedPipeline:
    """AdaPtis, simulated for one replica's documents."""
    batch = SortedBatch.of(lengths)
    chunking = packed_chunks(batch.lengths, options.context, rates_of(cost))
    best: tuple[TimedSetup, PlacementName] | None = None
    for name in PLACEMENTS:
        place = placement(name, cost.layout.stages)
        if len(place) > sum(cost.layout.layers):
            continue
        played = _moved(cost, chunking, batch, options, place)
        if played is not None and (best is None or played.rank < best[0].rank):
            best = played, name
    if best is None:
        raise ValueError("adaptis: the model's states fit no partition; raise the memory budget")
    played, name = best
    layers = " ".join(map(str, played.setup.cost.layout.layers))
    bound = lower_bound_seconds(batch.lengths, cost)
    return result("adaptis", played, bound, chunking.count, f"{name} placement, layers {layers}")


def _moved(
    cost: Cost, chunking: Chunking, batch: SortedBatch, options: Options, place: tuple[int, ...]
) -> TimedSetup | None:
    """The best partition found for a placement, moving one layer at a time away from the rank
    that is busy longest."""
    loads = loads_of(chunking, batch.lengths, options.multiple)
    even = Setup.even(cost, place, loads, chunking.sizes)
    features = even.cost.layout.features(loads).sum(axis=1)

    def played(layers: tuple[int, ...]) -> TimedSetup | None:
        shape = even.cost.replace(layers=layers)
        setup = dataclasses.replace(even, cost=shape)
        if (setup.headroom_bytes <= 0).any():
            return None
        return best_of(setup, warm_ups((True, False)), offload=False)

    starts = {even.cost.layout.layers, fastest_layers(even.cost, features)} - {None}
    made = [found for layers in sorted(starts) if (found := played(layers)) is not None]  # type: ignore[type-var,arg-type]
    best = min(made, key=lambda each: each.rank, default=None)
    for _ in range(ROUNDS if best is not None else 0):
        assert best is not None
        better = None
        for layers in _neighbours(best, place):
            other = played(layers)
            if other is not None and other.rank < best.rank:
                better = other
                break
        if better is None:
            break
        best = better
    return best


def _neighbours(best: TimedSetup, place: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """A layer from a stage of the busiest rank to one of the two least busy."""
    layers = best.setup.cost.layout.layers
    on, order = np.array(place), np.argsort(best.busy_seconds, kind="stable")
    for give in np.flatnonzero(on == order[-1]):
        for idle in order[:2]:
            for take in np.flatnonzero(on == idle):
                if give == take or layers[give] < 2:
                    continue
                moved = list(layers)
                moved[give] -= 1
                moved[take] += 1
                yield tuple(moved)
