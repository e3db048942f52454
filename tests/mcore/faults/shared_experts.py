"""Faults of routers with rows that several samples share."""

from dataclasses import replace

from megatron_epp.layers.moe.router_stats import Balancing, Pools, RouterStats
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing
from tests.mcore.faults import trees


def count_for_another(make, stats: RouterStats, of: Balancing, spans, layers, pools: Pools, scale):
    before = [path[:-1] for path in pools.paths]
    others = zip(before[1:] + before[:1], pools.paths, strict=True)
    paths = [(*prefix, path[-1]) for prefix, path in others]
    make(stats, of, spans, layers, replace(pools, paths=paths), scale)


def count_once(make, stats: RouterStats, *arguments) -> None:
    make(stats, *arguments)
    for number, pools in enumerate(stats._pools_of):
        for pool in pools[1:]:
            del stats._times[pool][number]
        stats._times[pools[0]][number] = 1
        del pools[1:]


FAULTS: Faults = {
    "nothing": nothing,
    # Of gradients that several leave for the K and V of a prefix the first alone arrives.
    "lose a branch": trees.FAULTS["lose a branch"],
    # What a sample continues counts for the sample before it.
    "count for a wrong sample": fault(RouterStats, "__init__", count_for_another),
    "nothing again": nothing,
    # Shared rows count for the first sample. From here on the bias is not where it should be.
    "count shared rows once": fault(RouterStats, "__init__", count_once),
}
around = in_turn(FAULTS)
