"""The placement that a job's flags ask for, and what it needs on Megatron's args.

Megatron's own checks see a pipeline of as many stages as there are ranks; its model is built part
by part (parts.py).
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

# On Megatron's args, not flags: the rank and the layers of every stage; plain lists, as checkpoints
# hold args. Empty where stage i lies on rank i.
PLACE, STAGE_LAYERS = "epp_place", "epp_stage_layers"


def place_of(args: Any) -> tuple[int, ...]:
    """The rank of every stage; () where stage i lies on rank i."""
    return tuple(getattr(args, PLACE, None) or ())


def stages_of(args: Any) -> int:
    """Stages of the job's pipeline, however many ranks they lie on."""
    return len(place_of(args)) or args.pipeline_model_parallel_size


def local_stages(place: Sequence[int], rank: int) -> tuple[int, ...]:
    """The stages of a pipeline rank, first to last."""
    return tuple(stage for stage, where in enumerate(place) if where == rank) or (rank,)


def asked_placement(args: Namespace, ranks: int) -> Placement | None:
    """The placement that --epp-placement asks for on ``ranks``; None: stage i on rank i.
    ValueError: one line."""
    text = getattr(args, "epp_placement", None)
    if text in (None, EVENLY, PLACEMENT_AUTO) or not args.epp:
        return None
    try:
        placement = read_placement(text, ranks, partial(bounded_text, expected=A_PLACEMENT))
        require_last_stage(placement)
    except OSError as error:
        raise ValueError(
            f"--epp-placement {text}: {error.strerror}; expected even, v, interleaved N, auto, "
            "flags, or a file"
        ) from error
    except ValueError as refusal:
        raise ValueError(f"--epp-placement {text}: {refusal}") from refusal
    if placement.is_even:
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
    """Layers of every stage: those that the placement says, or even ones. ValueError: one line."""
    stated = placement.layers
    if stated and sum(stated) != layers:
        raise ValueError(
            f"--epp-placement: layers {' '.join(map(str, stated))} are {sum(stated)}; expected "
            f"{layers}, those of the model"
        )
    if layers < placement.stages:
        raise ValueError(
            f"--epp-placement: {placement.stages} stages for {layers} layers; expected at most one "
            "stage per layer"
        )
    return stated or even_layers(layers, placement.stages)


def placed_values(
    placement: Placement, layers: Sequence[int], mtp_layers: int, pattern: str | None = None
) -> dict[str, Any]:
    """Values on Megatron's args for stages of ``layers``, the last of which predicts ``mtp_layers``
    tokens; ``pattern``: of a HybridModel. To Megatron's checks a rank has the layers of all its
    stages; where stage i lies on rank i, no others are needed."""
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
