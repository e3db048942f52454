"""Number of layers to offload to host memory.

Two limits apply: the copies must overlap with ops, and the layers must fit in host memory.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import Choice, Counts
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import BACKWARDS, KEEP, OFFLOAD, Kind


def hidden_layers(cost: Cost, loads: Loads) -> dict[Choice, np.ndarray]:
    """Return the maximum number of layers whose copies completely overlap with F, B and I.

    The result maps (layer kind, OFFLOAD) to a number [stages, chunks]. Layers of the first kind are
    chosen first; any order would do, because every byte takes equally long to copy. If a chunk
    offloads only one or two layers, these are on the device while its ops run (ir.IN_FLIGHT), and
    on the host otherwise.
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
    """Limit of host memory, ``budget_bytes``, for the offloaded layers of one rank.

    Where a rank has several stages or layer kinds, :func:`layers_offloaded` divides the limit.
    ``at_once`` is whether the offloaded layers of all chunks must fit at the same time, so that
    every order of ops fits.
    """

    budget_bytes: float = math.inf
    at_once: bool = False

    def fitting(
        self, aside: np.ndarray, layer_bytes: np.ndarray, least: np.ndarray, backward: np.ndarray
    ) -> np.ndarray:
        """Return ``aside``, reduced on stages whose offloaded layers do not fit in host memory.

        Args:
            aside: [stages, chunks] number of layers to offload.
            layer_bytes: [chunks] bytes that one offloaded layer holds.
            least: [stages, chunks] number of forwards before each backward (planner.order.warmup).
            backward: [chunks] chunks in the order of their backwards.
        """
        if math.isinf(self.budget_bytes):
            return aside
        fits = np.zeros_like(aside)
        for stage, layers in enumerate(aside):
            before = np.full_like(least[stage], len(layers)) if self.at_once else least[stage]
            for fraction in FRACTIONS:
                # Rounded cumulatively over the chunks, so that a fraction of few layers is not
                # always 0.
                some = np.diff(np.floor(fraction * np.cumsum(layers) + 1e-9), prepend=0.0)
                if _host_peak(some * layer_bytes, before, backward) <= self.budget_bytes:
                    fits[stage] = some
                    break
        return fits

    def narrower(self, peak_bytes: float, budget_bytes: float) -> "HostHeadroom":
        """Return a stricter limit, after a plan with ``peak_bytes`` exceeded ``budget_bytes``.

        A plan may run more forwards than the in-flight limit assumes. The first call reduces the
        limit in proportion to the excess. The second call restores the full ``budget_bytes``, but
        requires that all chunks fit at the same time; do not call it a third time.
        """
        if self.budget_bytes == budget_bytes:
            return HostHeadroom(0.98 * budget_bytes * budget_bytes / peak_bytes)
        return HostHeadroom(budget_bytes, at_once=True)


def layers_offloaded(
    cost: Cost, loads: Loads, host: HostHeadroom, least: np.ndarray, backward: np.ndarray
) -> dict[Choice, np.ndarray]:
    """Return, for each layer kind, the number [stages, chunks] of layers to offload.

    The number is that of :func:`hidden_layers`, or less if a stage's layers exceed host memory.
    Host memory is divided equally between layer kinds, and between a rank's stages.

    Args:
        cost: cost model, including the stages and parallel degrees.
        loads: numbers of tokens and query-key pairs of the chunks.
        host: limit of the host memory for the offloaded layers of one rank.
        least: [stages, chunks] number of forwards before each backward (planner.order.warmup).
        backward: [chunks] chunks in the order of their backwards.
    """
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


FRACTIONS = tuple(k / 20 for k in range(20, -1, -1))  # of the layers whose copies would be hidden


def _host_peak(moved: np.ndarray, least: np.ndarray, backward: np.ndarray) -> float:
    """Return the peak bytes of host memory of one stage under an in-flight limit.

    In F, ``moved`` [chunks] bytes are copied to the host; in B, they return to the device.
    """
    out = np.concatenate(([0.0], np.cumsum(moved)))
    back = np.concatenate(([0.0], np.cumsum(moved[backward])))[:-1]
    return float((out[least] - back).max(initial=0.0))


def without_offload(counts: Counts) -> Counts:
    """Return the entries of ``counts`` whose recompute mode is not OFFLOAD."""
    return {choice: grid for choice, grid in counts.items() if choice[1] != OFFLOAD}


def offload_of(counts: Counts) -> Counts:
    """Return the entries of ``counts`` whose recompute mode is OFFLOAD."""
    return {choice: grid for choice, grid in counts.items() if choice[1] == OFFLOAD}
