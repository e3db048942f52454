"""Times of a layer on its paths (implementations), on the GPUs of a job."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from megatron_epp.ir import KEEP
from megatron_epp.mcore.calibrate.measure import REPEATS
from megatron_epp.mcore.calibrate.probe import Probe, Shape, undisturbed
from megatron_epp.mcore.calibrate.profile_file import probe_of

Paths = Sequence[Callable[[], None]]


def path_seconds(
    args: Any, rows: Any, model: Any, at: int, paths: Paths, tokens: int
) -> list[float]:
    """Return the seconds of forward plus backward of a layer on each of ``paths``.

    All ranks that share the layer must call the function. It restores gradients and random states
    at its end. The layer stays on the last path.

    Args:
        args: Megatron's arguments.
        rows: ``RowShard`` that selects the rows (tokens) of a chunk on this rank.
        model: Stage module of this rank, wrapped.
        at: Index of the layer in the stage.
        paths: Functions, each of which selects an implementation of the layer.
        tokens: Number of tokens of the chunk.
    """
    with undisturbed(model):
        return timed_paths(probe_of(args, model, rows).of_layer(at), paths, Shape(tokens))


def timed_paths(probe: Probe, paths: Paths, shape: Shape) -> list[float]:
    """Return the median seconds of the probe's layer on each of ``paths``, for a chunk."""
    runs = []
    for repeat in range(1 + REPEATS):  # the first compiles kernels
        for select in paths:
            select()
            runs.append((probe.after_work(shape) if repeat else probe).layers(shape, KEEP))
    seconds = [run.forward_seconds + run.backward_seconds for run in runs]
    count = len(paths)
    return [median(seconds[number + count :: count]) for number in range(count)]
