"""Parser defaults that pass Megatron's checks before layers and placement are chosen."""

from typing import Any

from megatron_epp.cost.build import even_layers
from megatron_epp.ir.placement import Placement
from megatron_epp.mcore.flags.config import (
    PARTITION_AUTO,
    PLACING_FLAGS,
    layers_by_time,
    placement_by_time,
)
from megatron_epp.mcore.hybrid.pattern import pattern_of, placed_by_time, symbols_of_layers
from megatron_epp.mcore.placing.requested import asked_placement, layers_of_placement, placed_values


def placeholder(wanted: Any) -> dict[str, Any]:
    """Return parser defaults that pass Megatron's checks before the layers per stage are chosen.

    Args:
        wanted: The flags as typed.

    Raises:
        ValueError: Another flag also places layers, or there are more stages than layers.
    """
    stages = wanted.pipeline_model_parallel_size
    if (placement := asked_placement(wanted, stages)) is not None:
        return _placed(wanted, placement)
    if not layers_by_time(wanted) or stages == 1:
        return {}
    asked = "--epp-partition auto"
    if placement_by_time(wanted):
        asked = "--epp-placement auto"
        _require_cost_model(wanted)
    for name, silent in PLACING_FLAGS.items():
        if getattr(wanted, name) != silent:
            raise ValueError(
                f"--{name.replace('_', '-')} says where layers lie, and {asked} "
                "chooses that: leave one of the two out"
            )
    pattern = pattern_of(wanted)
    if pattern is not None and not placed_by_time(wanted):
        raise ValueError(
            f"--hybrid-layer-pattern {pattern}: its | say where stages end, and {asked} "
            "chooses that: leave one of the two out"
        )
    layers = wanted.num_layers if pattern is None else len(symbols_of_layers(pattern))
    if not layers:
        raise ValueError(
            f"{asked} divides the layers of --num-layers or --hybrid-layer-pattern; "
            "expected one of them"
        )
    if layers < stages:
        raise ValueError(
            f"--pipeline-model-parallel-size {stages}: more stages than the {layers} layers; "
            "expected at most one stage per layer"
        )
    if pattern is not None:  # Megatron does not check layers per stage in a pattern without |
        return {}
    even = Placement(tuple(range(stages)), even_layers(wanted.num_layers, stages))
    return placed_values(even, even.layers, wanted.mtp_num_layers or 0)


def _placed(wanted: Any, placement: Placement) -> dict[str, Any]:
    """Return parser defaults for ``placement``, which puts several stages on a rank."""
    if wanted.epp_partition == PARTITION_AUTO:
        raise ValueError(
            "--epp-partition auto chooses layers of one stage a rank; with --epp-placement give a "
            "file with a line 'layers'"
        )
    _require_cost_model(wanted)
    pattern = pattern_of(wanted)
    if pattern is not None and "|" in pattern:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern}: its | say what a rank has; with --epp-placement "
            "leave them out, and say with a line 'layers' of a file what each stage has"
        )
    layers = wanted.num_layers if pattern is None else len(symbols_of_layers(pattern))
    of_stages = layers_of_placement(placement, layers or 0)
    return placed_values(placement, of_stages, wanted.mtp_num_layers or 0, pattern)


def _require_cost_model(wanted: Any) -> None:
    if wanted.epp_plan is None and wanted.epp_cost_model is None:
        raise ValueError(
            f"--epp-placement {wanted.epp_placement}: parts of a model are not measured at start; "
            "give --epp-cost-model analytic, or the file that `python -m megatron_epp profile` "
            "writes"
        )
