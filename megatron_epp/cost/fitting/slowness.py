"""Relative speed of the pipeline ranks' devices, measured on the same chunks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import numpy as np

from megatron_epp.cost.fitting.fit import Sample
from megatron_epp.cost.fitting.readings import Readings
from megatron_epp.ir import Kind

DIFFER = 1.25  # ratio of seconds; smaller ones occur on equal devices of a busy host
ALIKE = 1.1  # ranks within this ratio get their median


def measured_slowness(of_kinds: Mapping[str, Sequence[Readings]]) -> tuple[float, ...]:
    """Return every pipeline rank's seconds relative to the fastest rank.

    The result is empty if ranks differ by less than DIFFER. Ranks with the same layer kind are
    compared by the median over replicas, and over F and B of the chunks that all of them measured.
    A rank that has no kind in common with other ranks is assumed to have their average speed.
    """
    ranks = 1 + max(one.rank for every in of_kinds.values() for one in every)
    rows, sides = [], []
    for every in of_kinds.values():
        offsets = _offsets(every)
        for rank, offset in offsets.items():
            row = np.zeros(ranks)
            row[list(offsets)] = -1 / len(offsets)
            row[rank] += 1
            rows.append(row)
            sides.append(offset)
    logs = np.linalg.lstsq(np.array(rows), np.array(sides), rcond=None)[0]
    if np.ptp(logs) < math.log(DIFFER):
        return ()
    factors = np.exp(_joined(logs))
    return tuple(round(float(factor), 3) for factor in factors / factors.min())


def _offsets(every: Sequence[Readings]) -> dict[int, float]:
    """Return the log seconds of one layer kind by pipeline rank, relative to their mean."""
    seen: dict[int, dict[tuple, list[float]]] = {}
    for one in every:
        for key, seconds in _seconds(one):
            seen.setdefault(one.rank, {}).setdefault(key, []).append(math.log(seconds))
    shared = set.intersection(*(set(each) for each in seen.values()))
    keys = sorted(shared)
    logs = np.array([[median(each[key]) for key in keys] for each in seen.values()])
    beyond = np.median(logs - logs.mean(0), axis=1)
    return dict(zip(seen, (beyond - beyond.mean()).tolist(), strict=True))


def _seconds(one: Readings) -> Iterable[tuple[tuple, float]]:
    """Yield (chunk and op, seconds) of stages with layers."""
    for kind, samples in ((Kind.FORWARD, one.forward), (Kind.BACKWARD, one.backward)):
        for each in samples:
            if each.layers and each.value > 0:
                yield _key(kind, each), each.value


def _key(kind: Kind, each: Sample) -> tuple:
    return (
        kind.value,
        each.choice,
        each.tokens,
        each.pairs,
        tuple(number for _, number in each.columns),
    )


def _joined(logs: np.ndarray) -> np.ndarray:
    """Return ``logs`` with the values of ranks of similar speed replaced by their median."""
    joined, order = logs.copy(), np.argsort(logs, kind="stable")
    first = 0
    for at in range(1, len(order) + 1):
        if at == len(order) or logs[order[at]] - logs[order[first]] > math.log(ALIKE):
            joined[order[first:at]] = np.median(logs[order[first:at]])
            first = at
    return joined
