"""First run of one layer of every kind on all ranks at the same time, before the first iteration.

Triton and NVRTC compile and tune kernels at their first call. Without this run, ranks would compile
one after another in the first iteration, and the other ranks would wait. With this run, all ranks
compile at the same time. The run also reports kernels that the device cannot run.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from megatron_epp.ir import KEEP
from megatron_epp.mcore.calibrate.probe import Probe, Shape, undisturbed
from megatron_epp.mcore.calibrate.profile_file import probe_of
from megatron_epp.mcore.kinds.modules import kinds_of_layer
from megatron_epp.mcore.kinds.mtp.mtp_layers import layers_of
from megatron_epp.runtime.consensus import all_gathered
from megatron_epp.runtime.memory_meter import out_of_memory

ROWS = 1024  # rows of the chunk, or half the longest document if that is less


def run_every_kind(args: Any, models: Sequence[Any], groups: Any, rows: Any) -> None:
    """Run forward and backward of one layer of every kind, on two documents and on a slice.

    All ranks of the job must call this function. It restores gradients and random states at its
    end.

    Args:
        args: Megatron's arguments.
        models: Stage modules of this rank, wrapped.
        groups: The job's process groups.
        rows: ``RowShard`` that selects the rows (tokens) of a chunk on this rank.

    Raises:
        ValueError: A kernel does not run on one of the ranks. All ranks raise the error.
        RuntimeError: This rank is out of memory.
    """
    problems: list[str] = []
    seen: set[tuple[str, ...]] = set()
    for model in models:
        with undisturbed(model):
            problems += _problems(probe_of(args, model, rows), seen)
    for problem in chain.from_iterable(all_gathered(problems, groups.control)):
        raise ValueError(f"{problem}; expected kernels that run on this device")


def _problems(probe: Probe, seen: set[tuple[str, ...]]) -> list[str]:
    """Return one line of text for every layer kind of the stage that fails to run.

    The function skips kinds in ``seen``, which earlier stages have run, and adds the stage's kinds.
    """
    size = min(ROWS, probe.context // 2)
    shapes = [Shape(size, pieces=2), Shape(size, size, cut=True)]
    problems = []
    for at, layer in enumerate(layers_of(probe.model)):
        modules = kinds_of_layer(layer)
        kinds = tuple(kind.KIND.NAME for kind in modules)
        if kinds in seen:
            continue
        seen.add(kinds)
        try:
            for shape in shapes if size > 0 else ():
                probe.of_layer(at).layers(shape, KEEP)
            for kind in modules:
                kind.compile_sizes(getattr(layer, kind.KIND.SLOT), probe.device)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            reason = (str(error).splitlines() or [repr(error)])[0]
            problems.append(f"layers of {' and '.join(kinds)} cannot run: {reason}")
    return problems
