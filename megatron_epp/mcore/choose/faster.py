"""Report of a placement that is faster than the job's, by the job's measured cost model.

A job chooses its placement before it measures, and keeps it. A restart can choose another
placement.
"""

import dataclasses
import logging
import shlex
from typing import Any

from megatron_epp.control.step_source import planned_documents
from megatron_epp.cost.profile import Profile
from megatron_epp.ir.placement import EVENLY
from megatron_epp.mcore.choose.choices import cost_and_options, first_batches
from megatron_epp.mcore.choose.kept import loads_in_other_stages
from megatron_epp.mcore.model.shape import mtp_shapes, placement_of

logger = logging.getLogger(__name__)

RESTART_PAYS = 0.03  # fraction of the time that a reported placement saves


def report_faster_placement(args: Any, profile: Profile) -> None:
    """Log the line of :func:`faster_placement`, unless it is None."""
    if (line := faster_placement(args, profile)) is not None:
        logger.info("%s", line)


def faster_placement(args: Any, profile: Profile) -> str | None:
    """Return a line on the fastest placement by ``profile``, with the flag that selects it.

    The function plans one batch with effort 0. It returns None if no placement saves the fraction
    RESTART_PAYS of the time, if there is no pipeline, if lengths or costs are unknown, or if
    checkpoints can only be loaded with their own placement.
    """
    one_format = getattr(args, "ckpt_format", "torch_dist") != "torch_dist"
    if args.pipeline_model_parallel_size == 1 or one_format:
        return None
    from megatron_epp.planner.choose.choice import PLACEMENT_NAMES, placed_cost, run_choice

    try:
        batches = [planned_documents(first_batches(args)[0])]
        cost, options = cost_and_options(args, placement_of(args).layers, profile)
        choice = run_choice(
            cost,
            batches,
            dataclasses.replace(options, effort=0),
            args.epp_planner,
            placements=(EVENLY, *PLACEMENT_NAMES),
            vocabularies=(cost.layout.vocabulary_parallel,),
            words=args.padded_vocab_size,
        )
    except (OSError, ValueError):
        return None
    if choice.gain < RESTART_PAYS:
        return None
    name, (*others, last) = choice.way.placement, choice.way.layers
    even = placed_cost(cost, name)
    if even is None or even.layout.layers != choice.way.layers:
        layers = (*others, last - len(mtp_shapes(args)))
        name = f"place {choice.cost.layout.placement} layers {' '.join(map(str, layers))}"
    loads = "this run's checkpoints load in it"
    if not loads_in_other_stages(args):
        loads = "with --dist-ckpt-optim-fully-reshardable, given now, checkpoints load in it"
    return (
        f"--epp-placement {shlex.quote(name)} takes {choice.gain:.0%} less time by the measured "
        f"cost model (simulated); give it at a restart: {loads}"
    )
