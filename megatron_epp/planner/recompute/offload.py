"""How many layers can lie in the host's memory: at no cost in time, and where there is room."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import Choice, Counts
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import BACKWARDS, KEEP, OFFLOAD, Kind


def hidden_layers(cost: Cost, loads: Loads) -> dict[Choice, np.ndarray]:
    """[stages, chunks]: the most layers whose copies hide behind F, and behind B and I alike. Those
    of the first kind first: a byte takes as long to copy whichever layer saved it.

    Where it is only one or two, all of them are on the device while their chunk's ops run
    (ir.IN_FLIGHT), and gone while other chunks' do.
    """
    kinds = (Kind.FORWARD, *BACKWARDS)
    seconds = np.min([cost.seconds.of(kind, loads) for kind in kinds], axis=0)
    aside: dict[Choice, np.ndarray] = {}
    for kind, layers in enumerate(cost.layout.kinds.counts):
        copy = cost.memory.copy_seconds(loads, kind)
        grid = np.minimum(np.floor(seconds / copy), layers[:, None])
        aside[kind, OFFLOAD] = grid
        seconds = seconds - grid * copy
    return aside


@dataclass(frozen=True, slots=True)
class HostHeadroom:
    """``budget_bytes`` of the host's memory for each stage's offloaded layers. ``at_once``: those
    of all chunks must fit together, so that no order of the ops is too much."""

    budget_bytes: float = math.inf
    at_once: bool = False

    def fitting(
        self, aside: np.ndarray, layer_bytes: np.ndarray, least: np.ndarray, backward: np.ndarray
    ) -> np.ndarray:
        """``aside`` [stages, chunks] with fewer layers on the stages where they do not fit.

        layer_bytes   [chunks] of one layer
        least         [stages, chunks] forwards before each backward (planner.order.warmup)
        backward      chunks in the order of their backwards
        """
        if math.isinf(self.budget_bytes):
            return aside
        fits = np.zeros_like(aside)
        for stage, layers in enumerate(aside):
            before = np.full_like(least[stage], len(layers)) if self.at_once else least[stage]
            for fraction in FRACTIONS:
                # Rounded along the chunks, so that a small share of few layers is not none.
                some = np.diff(np.floor(fraction * np.cumsum(layers) + 1e-9), prepend=0.0)
                if _host_peak(some * layer_bytes, before, backward) <= self.budget_bytes:
                    fits[stage] = some
                    break
        return fits

    def narrower(self, peak_bytes: float, budget_bytes: float) -> "HostHeadroom":
        """After a plan that took ``peak_bytes``, as it does more forwards than it must: room for as
        much less; and when that was too much again, room for all chunks at once."""
        if self.budget_bytes == budget_bytes:
            return HostHeadroom(0.98 * budget_bytes * budget_bytes / peak_bytes)
        return HostHeadroom(budget_bytes, at_once=True)


def layers_offloaded(
    cost: Cost, loads: Loads, host: HostHeadroom, least: np.ndarray, backward: np.ndarray
) -> dict[Choice, np.ndarray]:
    """:func:`hidden_layers` as far as the ``host`` has room; each kind has an equal part of it, and
    so has each stage of a rank that has several, whatever their order."""
    hidden = hidden_layers(cost, loads)
    parts = len(hidden)
    if cost.layout.place:
        parts *= max(map(cost.layout.place.count, cost.layout.place))
        least = np.full((cost.layout.stages, loads.chunks), loads.chunks)
    part = dataclasses.replace(host, budget_bytes=host.budget_bytes / parts)
    return {
        (kind, mode): part.fitting(
            grid, cost.memory.saved_bytes((kind, KEEP), loads), least, backward
        )
        for (kind, mode), grid in hidden.items()
    }


FRACTIONS = tuple(k / 20 for k in range(20, -1, -1))  # of the layers that would hide


def _host_peak(moved: np.ndarray, least: np.ndarray, backward: np.ndarray) -> float:
    """Bytes of one stage under the window law ``least``; ``moved`` [chunks] out by F, back by B."""
    out = np.concatenate(([0.0], np.cumsum(moved)))
    back = np.concatenate(([0.0], np.cumsum(moved[backward])))[:-1]
    return float((out[least] - back).max(initial=0.0))


def without_offload(counts: Counts) -> Counts:
    return {choice: grid for choice, grid in counts.items() if choice[1] != OFFLOAD}


def offload_of(counts: Counts) -> Counts:
    return {choice: grid for choice, grid in counts.items() if choice[1] == OFFLOAD}
