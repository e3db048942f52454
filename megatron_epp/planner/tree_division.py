"""Division of samples with shared prefixes over replicas, by predicted time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.planner.chunks.slicing import Rates

_TRIES, _NEAR = 16, 1e-3  # number of bounds tried, and relative precision that suffices
Assignments = tuple[tuple[int, ...], ...]  # documents of every replica


def divided_trees(
    forest: PrefixForest, rates: Rates, replicas: int, most: int | None = None
) -> Assignments:
    """Return the indices of the samples of every replica: at least 1, at most ``most``.

    A replica computes a prefix once for all of its samples that share the prefix. Samples with the
    same root node in ``forest`` form a group. For a given time limit, groups are assigned longest
    first, each to the replica with the least seconds so far. If a group would exceed the limit, its
    remaining samples go to another replica, which computes the prefix again. Bisection finds
    nearly the smallest limit for which all samples can be assigned.

    Args:
        forest: samples and their shared prefixes.
        rates: seconds per token, query-key pair and chunk.
        replicas: number of replicas, at most that of samples.
        most: maximum number of samples of a replica, at least that of samples divided by
            ``replicas``; None for no limit.
    """
    dealing = _Dealing(forest, node_seconds(forest, rates), replicas, most)
    division = dealing.within(math.inf)
    assert division is not None
    latest, best = division
    earliest = max(dealing.total / replicas, dealing.longest)
    for _ in range(_TRIES):
        bound = (earliest + latest) / 2
        division = dealing.within(bound)
        if division is None:
            earliest = bound
        elif division[0] < latest:
            latest, best = division
        if latest - earliest < _NEAR * latest:
            break
    return best


@dataclass(frozen=True, eq=False)
class _Dealing:
    """Assignment of samples to replicas within a time limit; prefix node n takes ``seconds[n]``."""

    forest: PrefixForest
    seconds: Sequence[float]
    replicas: int
    most: int | None
    paths: list[tuple[int, ...]] = field(init=False)
    groups: list[list[int]] = field(init=False)  # samples with the same root, subtrees together

    def __post_init__(self) -> None:
        paths = [self.forest.path(sample) for sample in range(len(self.forest.last))]
        groups: dict[int, list[int]] = {}
        for sample in sorted(range(len(paths)), key=lambda s: (paths[s], s)):
            groups.setdefault(paths[sample][0], []).append(sample)
        object.__setattr__(self, "paths", paths)
        takes = {root: self._of(group, paths) for root, group in groups.items()}
        order = sorted(groups, key=lambda root: (-takes[root], root))
        object.__setattr__(self, "groups", [groups[root] for root in order])

    def _of(self, samples: Sequence[int], paths: Sequence[tuple[int, ...]]) -> float:
        return sum(self.seconds[n] for n in {n for sample in samples for n in paths[sample]})

    @property
    def total(self) -> float:
        return sum(self.seconds)

    @property
    def longest(self) -> float:
        return max(self._of([sample], self.paths) for sample in range(len(self.paths)))

    def within(self, bound: float) -> tuple[float, Assignments] | None:
        """Return (slowest replica's seconds, samples by replica); None if ``bound`` is too low."""
        taken = [0.0] * self.replicas
        assignments: list[list[int]] = [[] for _ in taken]
        has = [set[int]() for _ in taken]
        left = len(self.paths)

        def more(sample: int, replica: int) -> float:
            new = (n for n in self.paths[sample] if n not in has[replica])
            return taken[replica] + sum(self.seconds[n] for n in new)

        def first(samples: int) -> int:
            """Return the replica with the least seconds that can take ``samples`` more, or -1.

            If there are no more samples left than empty replicas, only empty replicas are
            considered.
            """
            empty = [replica for replica, assignment in enumerate(assignments) if not assignment]
            able = empty if left <= len(empty) else range(self.replicas)
            free = [
                r for r in able if self.most is None or len(assignments[r]) + samples <= self.most
            ]
            return min(free, key=lambda r: (taken[r], r), default=-1)

        for group in self.groups:
            replica = first(len(group))
            alone = replica < 0 or taken[replica] + self._of(group, self.paths) > bound
            if alone or left - len(group) < sum(not assignment for assignment in assignments) - 1:
                replica = first(1)
            for sample in group:
                full = self.most is not None and len(assignments[replica]) >= self.most
                forced = left <= sum(not assignment for assignment in assignments)
                if full or (forced and assignments[replica]) or more(sample, replica) > bound:
                    replica = first(1)
                if (seconds := more(sample, replica)) > bound:
                    return None
                taken[replica] = seconds
                assignments[replica].append(sample)
                has[replica].update(self.paths[sample])
                left -= 1
        return max(taken), tuple(tuple(sorted(assignment)) for assignment in assignments)


def node_seconds(forest: PrefixForest, rates: Rates) -> list[float]:
    """Return the seconds of every node of the prefix forest, without its prefix."""
    ends = rates.document_seconds(np.array([node.stop for node in forest.nodes]))
    starts = rates.document_seconds(np.array([node.start for node in forest.nodes]))
    seconds: list[float] = (ends - starts).tolist()
    return seconds
