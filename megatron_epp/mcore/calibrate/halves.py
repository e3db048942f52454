"""Time of a layer of experts for whole chunks and in two halves of rows, on the GPUs of a job."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from megatron_epp.ir import KEEP
from megatron_epp.mcore.calibrate.measure import REPEATS
from megatron_epp.mcore.calibrate.probe import Probe, Shape, undisturbed
from megatron_epp.mcore.calibrate.profile_file import probe_of
from megatron_epp.mcore.kinds.moe.halves import set_halved_from
from megatron_epp.mcore.kinds.moe.router import moe_layers
from megatron_epp.runtime.consensus import largest
from megatron_epp.runtime.groups import Groups

# Tokens of the timed chunk, relative to the number from which halves are faster by the cost model.
MARGIN = 4


def timed_tokens(least: float, context: int) -> int:
    """Return the tokens of the chunk to time; 0 if no chunk of ``context`` tokens is halved."""
    return 0 if least > context else max(1, int(min(MARGIN * least, context)))


def slowest_seconds(
    args: Any, models: Sequence[Any], groups: Groups, rows: Any, tokens: int
) -> tuple[float, float]:
    """Return the seconds of a layer of experts, whole and in halves, on the slowest ranks.

    Collective. Each rank times forward and backward of its first layer of experts. The function
    restores gradients and random states at its end.

    Args:
        args: Megatron's arguments.
        models: Stage modules of this rank, wrapped.
        groups: The job's process groups.
        rows: ``RowShard`` that selects the rows (tokens) of a chunk on this rank.
        tokens: Tokens of the chunk.
    """
    own = (0.0, 0.0)
    layers = ((model, at, experts) for model in models for at, experts in moe_layers(model))
    if (first := next(layers, None)) is not None:
        model, at, experts = first
        with undisturbed(model):
            own = layer_seconds(probe_of(args, model, rows).of_layer(at), experts, Shape(tokens))
    undivided, halves = largest(own, groups.control)
    return undivided, halves


def layer_seconds(probe: Probe, experts: Any, shape: Shape) -> tuple[float, float]:
    """Return the median seconds of the probe's layer, whole and in halves; it is whole afterwards.

    Args:
        probe: Probe of the layer.
        experts: The layer's MoELayer.
        shape: The chunk.
    """
    seconds: dict[float, list[float]] = {math.inf: [], 0.0: []}
    for repeat in range(1 + REPEATS):  # the first compiles kernels
        for least, taken in seconds.items():
            set_halved_from(experts, least)
            run = (probe.after_work(shape) if repeat else probe).layers(shape, KEEP)
            taken.append(run.forward_seconds + run.backward_seconds)
    set_halved_from(experts, math.inf)
    undivided, halves = (median(taken[1:]) for taken in seconds.values())
    return undivided, halves
