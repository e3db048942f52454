"""Placement that a job's flags request, and the values of Megatron's args for it.

For Megatron's own checks, the args describe a pipeline with one stage per rank. The model is built
one stage at a time (parts.py).
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron_epp.cost.build import even_layers
from megatron_epp.ir.placement import (
    A_PLACEMENT,
    EVENLY,
    Placement,
    read_placement,
    require_last_stage,
)
from megatron_epp.mcore.flags.config import PLACEMENT_AUTO, PLACING_FLAGS
from megatron_epp.mcore.hybrid.pattern import with_boundaries
from megatron_epp.safe_files import bounded_text

# Attributes of Megatron's args, not flags: the rank and the number of layers of every stage. They
# are plain lists, because checkpoints save args; empty if stage i lies on rank i.
PLACE, STAGE_LAYERS = "epp_place", "epp_stage_layers"


def place_of(args: Any) -> tuple[int, ...]:
    """Return the rank of every stage; () if stage i lies on rank i."""
    return tuple(getattr(args, PLACE, None) or ())


def stages_of(args: Any) -> int:
    """Return the number of stages of the job's pipeline."""
    return len(place_of(args)) or args.pipeline_model_parallel_size


def local_stages(place: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the stages of a pipeline rank, first to last."""
    return tuple(stage for stage, where in enumerate(place) if where == rank) or (rank,)


def asked_placement(args: Namespace, ranks: int) -> Placement | None:
    """Return the placement of --epp-placement on ``ranks`` ranks; None if stage i lies on rank i.

    The result is also None for ``auto``, and without --epp.

    Raises:
        ValueError: The placement is not valid, has no effect, or contradicts another flag.
    """
    text = getattr(args, "epp_placement", None)
    if text in (None, EVENLY, PLACEMENT_AUTO) or not args.epp:
        return None
    try:
        placement = read_placement(text, ranks, partial(bounded_text, expected=A_PLACEMENT))
        require_last_stage(placement)
    except OSError as error:
        raise ValueError(
            f"--epp-placement {text}: {error.strerror}; expected even, v, interleaved N, auto "
            "(which also heeds Megatron's flags of virtual stages), or a file"
        ) from error
    except ValueError as refusal:
        raise ValueError(f"--epp-placement {text}: {refusal}") from refusal
    if placement.is_even and not placement.layers:
        return None
    if ranks == 1:
        raise ValueError(
            f"--epp-placement {text}: has no effect with one pipeline rank; leave it out"
        )
    for name, silent in PLACING_FLAGS.items():
        if getattr(args, name) != silent:
            raise ValueError(
                f"--epp-placement {text}: --{name.replace('_', '-')} says how many layers each "
                "rank has; say with lines 'place' and 'layers' of a file what each stage has"
            )
    return placement


def layers_of_placement(placement: Placement, layers: int) -> tuple[int, ...]:
    """Return the number of layers of every stage.

    If the placement contains no layers, the numbers of the stages differ by at most 1.

    Raises:
        ValueError: The placement's layers do not sum to ``layers``, the number of layers of the
            model, or there are more stages than layers.
    """
    stated = placement.layers
    if stated and sum(stated) != layers:
        raise ValueError(
            f"--epp-placement: layers {' '.join(map(str, stated))} are {sum(stated)}; expected "
            f"{layers}, those of the model"
        )
    if layers < placement.stages:
        raise ValueError(
            f"--epp-placement: {placement.stages} stages for {layers} layers; expected at most one "
            "stage per layer; auto chooses among the placements that the layers fill"
        )
    return stated or even_layers(layers, placement.stages)


def placed_values(
    placement: Placement, layers: Sequence[int], mtp_layers: int, pattern: str | None = None
) -> dict[str, Any]:
    """Return the values of Megatron's args for a placement.

    For Megatron's checks, the layout or pattern assigns each rank the layers of all its stages. The
    rank and the layers of every stage are added, unless stage i lies on rank i.

    Args:
        placement: The rank of every stage.
        layers: Number of layers of every stage.
        mtp_layers: Number of MTP layers of the last stage.
        pattern: Layer pattern of a HybridModel; None for a GPTModel.

    Returns:
        Values by attribute name.
    """
    from megatron_epp.planner.choose.partition import layout_text

    of_ranks = [0] * placement.ranks
    for stage, rank in enumerate(placement.place):
        of_ranks[rank] += layers[stage]
    boundaries = {"pipeline_model_parallel_layout": layout_text(of_ranks, mtp_layers)}
    if pattern is not None:
        boundaries = {"hybrid_layer_pattern": with_boundaries(pattern, of_ranks)}
    if placement.is_even:
        return boundaries
    return {PLACE: list(placement.place), STAGE_LAYERS: list(layers), **boundaries}
