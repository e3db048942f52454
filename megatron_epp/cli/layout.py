"""Layout of a run: options define it, and this module chooses what they leave open."""

import argparse
import shlex
import sys
from functools import partial
from typing import Any

from megatron_epp.cli.documents import Batches
from megatron_epp.cli.machine import cost_of, model_of
from megatron_epp.cli.options import UsageError
from megatron_epp.cli.progress import Workers, bar
from megatron_epp.cost.cost import Cost
from megatron_epp.ir.placement import A_PLACEMENT, Placement, read_placement
from megatron_epp.planner.choose.choice import (
    PLACEMENT_NAMES,
    padded_words,
    ruled_out,
    run_choice,
)
from megatron_epp.planner.choose.partition import layout_flags
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.safe_files import bounded_text

AUTO = "auto"  # value of an option that is chosen by the corpus's lengths


def named_layout_cost(arguments: argparse.Namespace, planner: str) -> Cost:
    """Return the cost model of the layout that the options name.

    By default, every rank has one stage, the layers are divided evenly, and the LM head is on the
    last stage. Chunks are not padded.

    Args:
        arguments: options of the command.
        planner: name of the planner.

    Raises:
        UsageError: if an option is missing or has no effect, or two options decide the same
            setting.
        ValueError: if a name or file is not valid, or the model states do not fit in memory.
    """
    layers = tuple(arguments.layers) if arguments.layers else None
    pp = arguments.pp
    if pp is None:
        if layers is None:
            raise UsageError("--pp is missing; expected the number of pipeline stages")
        pp = len(layers)
    if arguments.placement == AUTO:
        if arguments.layers:
            raise UsageError(
                "--layers names the layers of every stage and --placement auto chooses the layers "
                "of the stages; expected one of the two"
            )
        _require_pipeline("--placement auto", pp, planner)
    place: tuple[int, ...] = ()
    if arguments.placement not in (None, AUTO):
        placement = _named_placement(arguments, pp, planner)
        layers = layers or placement.layers or None
        pp, place = placement.stages, () if placement.is_even else placement.place
    asked = arguments.vocab_parallel
    if asked == "on" and pp == 1:
        raise UsageError(
            "--vocab-parallel on shards the LM head over the stages, and there is one; expected "
            "--pp of at least 2, or leave it out"
        )
    if asked == "on" and planner not in PLANNERS:
        raise UsageError(
            f"--vocab-parallel on has no effect on {planner}, which makes no pipeline plan"
        )
    degrees: dict[str, Any] = {"pp": pp, "cp": arguments.cp, "dp": arguments.dp}
    return cost_of(arguments, **degrees, layers=layers, cut=asked == "on", place=place)


def run_cost(
    arguments: argparse.Namespace,
    cost: Cost,
    batches: Batches,
    options: Options,
    planner: str,
    apart: bool = False,
) -> Cost:
    """Return the cost model of a run, and print on stderr what is chosen for it.

    Placement, layers and vocabulary parallelism are chosen together where the options leave them
    open. As in training, the choices depend on the first batches of the corpus, not on the planned
    batch.

    Args:
        arguments: options of the command.
        cost: cost model of the layout that the options name, with padded chunks.
        batches: batches of the corpus.
        options: options of the planner.
        planner: name of the planner.
        apart: whether to choose for plans in which documents share no prefixes.
    """
    if planner not in PLANNERS or cost.layout.stages == 1:
        return cost
    asked = arguments.vocab_parallel
    open_stages = arguments.placement == AUTO or not (arguments.placement or arguments.layers)
    why = ruled_out(cost) if asked == AUTO else None
    if why is not None:
        print(f"vocabulary parallelism: off; {why}", file=sys.stderr)
    both = asked == AUTO and why is None
    if not (open_stages or both):
        return cost
    words = model_of(arguments).vocabulary if arguments.model else 0
    with Workers() as workers:
        choice = run_choice(
            *(cost, batches.first if apart else batches.first_forests, options, planner),
            placements=PLACEMENT_NAMES if open_stages else (),
            vocabularies=[False, True] if both else [asked == "on"],
            words=padded_words(words, cost.layout.tp),
            run=lambda function, tasks: bar(workers(function, tasks), len(tasks), "stages"),
        )
    without = " without shared prefixes" * apart
    print(f"stages{without}: {choice.way}; {choice.comparison} (simulated)", file=sys.stderr)
    layout = choice.cost.layout
    flags = layout_flags(layout.layers, layout.pinned_layers - 1)
    if open_stages and not layout.place and flags and not apart:
        print(f"layers in Megatron's flags: {shlex.join(flags)}", file=sys.stderr)
    return choice.cost


def _named_placement(arguments: argparse.Namespace, ranks: int, planner: str) -> Placement:
    """Return the placement that --placement names for ``ranks`` pipeline ranks."""
    text = arguments.placement
    try:
        placement = read_placement(text, ranks, partial(bounded_text, expected=A_PLACEMENT))
    except OSError as error:
        raise UsageError(
            f"--placement {text}: {error.strerror}; expected even, v, auto, "
            "interleaved N, 'place' and the rank of every stage, or a file"
        ) from error
    except ValueError as refusal:  # from the file or the placement
        raise UsageError(f"--placement {text}: {refusal}") from refusal
    if arguments.layers and placement.layers:
        raise UsageError(
            f"--placement {text} and --layers both name the layers of every stage; expected one of "
            "the two"
        )
    if not placement.is_even:
        _require_pipeline(f"--placement {text}", ranks, planner)
    if arguments.model is None:  # the cost-model file and --layers say how many there are
        return placement
    model = model_of(arguments)
    if placement.stages > (layers := model.layers - model.mtp_layers_count):
        raise UsageError(
            f"--placement {text}: {placement.stages} stages for {layers} layers; expected at most "
            "one stage per layer"
        )
    return placement


def _require_pipeline(option: str, ranks: int, planner: str) -> None:
    """Raise a UsageError if ``option`` has no effect without a pipeline."""
    if planner not in PLANNERS:
        raise UsageError(f"{option} has no effect on {planner}, which makes no pipeline plan")
    if ranks == 1:
        raise UsageError(f"{option} has no effect with one stage; leave it out")
