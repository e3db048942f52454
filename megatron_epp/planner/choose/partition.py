"""Partition of the layers into stages that minimizes the slowest stage's time, within memory.

Like AdaPtis (arXiv 2509.23722), this module moves the boundaries between stages, which hold
contiguous layers. A partition is chosen once per run, because weights do not move between
iterations. The choice uses the document lengths expected from the corpus. First, this module
minimizes the largest sum of layer times of a stage. Then choice.run_choice plans whole batches,
because memory and late slices of long documents may favor another partition.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megatron_epp.corpus.shared_prefixes import Batch, computed_spans
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Kind

# Assumed number of chunks per stage before there is a plan; chosen by hand.
LIKELY_CHUNKS = 8


def layer_costs(cost: Cost) -> Cost:
    """Return ``cost`` with one stage per layer; the last stage also has the LM head."""
    layers = sum(cost.layout.layers)
    budget = max(cost.device_budget_bytes)
    profile = cost.layout.profile.without_slowness
    each = {"layers": (1,) * layers, "place": (), "device_budget_bytes": (budget,) * layers}
    return cost.replace(profile=profile, **each)


def stage_layer_seconds(cost: Cost, features: np.ndarray) -> np.ndarray:
    """Return the seconds of F plus B of each layer on each stage's rank: [stages, layers].

    ``features`` [columns] are the tokens, query-key pairs, etc. that every layer processes.
    """
    per = layer_costs(cost).seconds
    exchanged = per.communication_per(Kind.FORWARD) + per.communication_per(Kind.BACKWARD)
    seconds = (per.per(Kind.FORWARD) + per.per(Kind.BACKWARD)) @ features
    computed = seconds - exchanged @ features
    return seconds + np.outer(cost.layout.slowness - 1, computed)


def expected_features(cost: Cost, batches: Sequence[Batch]) -> np.ndarray:
    """Return the features [columns] of ``cost`` (tokens, pairs, ...): mean over ``batches``."""
    chunks = float(LIKELY_CHUNKS * cost.layout.stages)
    spans = map(computed_spans, batches)
    every = [cost.layout.columns.batch_features(own, chunks, starts) for own, starts in spans]
    return np.mean(every, axis=0)


def fastest_layers(cost: Cost, features: np.ndarray) -> tuple[int, ...] | None:
    """Return the number of layers per stage that minimizes the slowest stage's time.

    ``features`` [columns] are those of :func:`expected_features`. Ties are broken by the least sum
    of squared stage seconds, which also balances the other stages. Every stage has a layer. With
    several stages per rank, a search minimizes the slowest rank's time. Return None if the model
    states do not fit in memory.
    """
    seconds = stage_layer_seconds(cost, features)
    if cost.layout.place:
        return _fastest_on_ranks(cost, seconds)
    states = np.array(layer_costs(cost).memory.states_bytes)
    stages, layers = seconds.shape
    if stages == 1:
        return (layers,)
    before = _before(seconds)
    states_before = np.concatenate(([0.0], np.cumsum(states)))
    # best[s, j]: (slowest stage, sum of squares) of layers [0, j) on stages 0..s.
    best = np.full((stages, layers + 1, 2), np.inf)
    came = np.zeros((stages, layers + 1), np.int64)
    for j in range(1, layers - cost.layout.pinned_layers + 1):
        if states_before[j] < cost.device_budget_bytes[0]:
            best[0, j] = before[0, j], before[0, j] ** 2
    for s in range(1, stages):
        for j in range(s + 1, layers + 1):
            if s < stages - 1 and j > layers - cost.layout.pinned_layers:
                break
            i = np.arange(s, j)
            fits = states_before[j] - states_before[i] < cost.device_budget_bytes[s]
            stage_seconds = before[s, j] - before[s, i]
            slowest = np.where(fits, np.maximum(best[s - 1, i, 0], stage_seconds), np.inf)
            squares = best[s - 1, i, 1] + stage_seconds**2
            least = slowest.min()
            if not np.isfinite(least):
                continue
            ties = np.flatnonzero(slowest <= least * (1 + 1e-12))
            at = ties[squares[ties].argmin()]
            best[s, j] = slowest[at], squares[at]
            came[s, j] = i[at]
    if not np.isfinite(best[-1, layers, 0]):
        return None
    ends = [layers]
    for s in range(stages - 1, 0, -1):
        ends.append(int(came[s, ends[-1]]))
    boundaries = [0, *reversed(ends)]
    return tuple(int(b - a) for a, b in pairwise(boundaries))


def _before(seconds: np.ndarray) -> np.ndarray:
    """Return the total seconds [stages, layers + 1] of all layers before each layer."""
    return np.concatenate((np.zeros((len(seconds), 1)), np.cumsum(seconds, axis=1)), axis=1)


def _fastest_on_ranks(cost: Cost, seconds: np.ndarray) -> tuple[int, ...] | None:
    """Return layers per stage that minimise the slowest rank's time, then squared stage times.

    The search starts from the layers of ``cost``. It repeats the best move of one layer between
    any two stages while that helps. ``seconds`` [stages, layers]: seconds of a layer on a stage.
    Return None if the model states do not fit.
    """
    before, each = _before(seconds), np.arange(cost.layout.stages)
    on = np.array(cost.layout.placement.place)
    least = np.array([1] * (cost.layout.stages - 1) + [cost.layout.pinned_layers])

    def price(layers: np.ndarray) -> tuple[float, float]:
        ends = np.cumsum(layers)
        taken = before[each, ends] - before[each, ends - layers]
        return float(np.bincount(on, weights=taken).max()), float((taken**2).sum())

    at = np.array(cost.layout.layers)
    best = price(at)
    while True:
        moves = []
        for give in np.flatnonzero(at > least):
            for take in range(cost.layout.stages):
                moved = at.copy()
                moved[give] -= 1
                moved[take] += 1
                moves.append((price(moved), tuple(moved.tolist())))
        if not moves or min(moves)[0] >= (best[0] * (1 - 1e-12), best[1]):
            break
        best, layers = min(moves)
        at = np.array(layers)
    layers = tuple(at.tolist())
    return layers if with_layers(cost, layers) is not None else None


def with_layers(cost: Cost, layers: tuple[int, ...]) -> Cost | None:
    """Return ``cost`` with ``layers`` per stage; None if the model states do not fit."""
    moved = cost.replace(layers=layers)
    states = moved.states_of_ranks
    fits = all(s < b for s, b in zip(states, moved.device_budget_bytes, strict=True))
    return moved if fits else None


def layout_flags(layers: Sequence[int], mtp_layers: int = 0) -> list[str]:
    """Return Megatron's flags for ``layers`` per stage; [] if decoder layers are even.

    The last ``mtp_layers`` layers are MTP layers, which do not count as decoder layers.
    """
    layers = (*layers[:-1], layers[-1] - mtp_layers)
    if len(set(layers)) == 1:
        return []
    first, *middle, last = layers
    if len(set(middle)) == 1:
        return [
            *("--decoder-first-pipeline-num-layers", str(first)),
            *("--decoder-last-pipeline-num-layers", str(last)),
        ]
    return ["--pipeline-model-parallel-layout", layout_text(layers, mtp_layers)]


def layout_text(layers: Sequence[int], mtp_layers: int = 0) -> str:
    """Return the value of Megatron's --pipeline-model-parallel-layout.

    The embedding is first, and the loss last, after ``mtp_layers`` MTP layers.
    """
    stages = [f"t*{count}" if count > 1 else "t" * count for count in layers]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * mtp_layers + "L"
    return "|".join(stages)
