"""Layout of a run: what the options name, and what the auto options choose."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron_epp.cli.documents import Batches
from megatron_epp.cli.machine import cost_of, model_of, with_padding
from megatron_epp.cli.options import UsageError
from megatron_epp.cost.cost import Cost
from megatron_epp.ir.placement import A_PLACEMENT, Placement, read_placement
from megatron_epp.planner import PLANNERS, Options
from megatron_epp.planner.choose.choice import (
    PLACEMENT_NAMES,
    padded_words,
    ruled_out,
    run_choice,
)
from megatron_epp.planner.choose.partition import layout_flags
from megatron_epp.safe_files import bounded_text

AUTO = "auto"  # value of an option that is chosen by the corpus's lengths


def run_costs(
    arguments: argparse.Namespace, batches: Batches, options: Options, planner: str
) -> tuple[Cost, Cost]:
    """Return two cost models: with the choice of --partition auto, and with all auto choices.

    Only the second cost model has the choices of --placement auto and --vocab-parallel auto. This
    function prints all choices on stderr. As in training, the choices depend on the first batches
    of the corpus, not on the planned batch.

    Args:
        arguments: options of the command.
        batches: batches of the corpus.
        options: options of the planner.
        planner: name of the planner.

    Raises:
        UsageError: if an option has no effect, or two options decide the same setting.
    """
    cost = named_layout_cost(arguments, batches.first)
    asked, stages = arguments.vocab_parallel, cost.layout.stages
    if asked == "on" and planner not in PLANNERS:
        raise UsageError(
            f"--vocab-parallel {asked} has no effect on {planner}, which makes no pipeline plan"
        )
    by_time, anywhere = arguments.partition != "even", arguments.placement == AUTO
    for flag in ("--partition",) * by_time + ("--placement",) * anywhere:
        _require_open(flag, arguments, cost, planner)
    open_vocabulary = asked == AUTO and stages > 1 and planner in PLANNERS
    why = ruled_out(cost) if open_vocabulary else None
    chosen = cost
    if by_time or anywhere or (open_vocabulary and why is None):
        choose = partial(run_choice, cost, batches.first, options, planner)
        both = open_vocabulary and why is None
        words = model_of(arguments).vocabulary if arguments.model else 0
        choice = choose(
            placements=PLACEMENT_NAMES if anywhere else (),
            vocabularies=[False, True] if both else [asked == "on"],
            by_time=by_time or anywhere,
            words=padded_words(words, cost.layout.tp),
        )
        chosen = choice.cost
        print(f"stages: {choice.way}; {choice.comparison} (simulated)", file=sys.stderr)
        if by_time:
            if anywhere or both:
                cost = choose(vocabularies=[asked == "on"], by_time=True).cost
            else:
                cost = chosen
            flags = layout_flags(cost.layout.layers, cost.layout.pinned_layers - 1)
            said = " ".join(flags) or "even layers are best; no flags of Megatron's are needed"
            print(f"partition: {' '.join(map(str, cost.layout.layers))}; {said}", file=sys.stderr)
    if why is not None:
        print(f"vocabulary parallelism: off; {why}", file=sys.stderr)
    return cost, chosen


def named_layout_cost(arguments: argparse.Namespace, batches: Sequence[Sequence[int]] = ()) -> Cost:
    """Return the cost model of the layout that the options name, before auto options are resolved.

    With --placement auto, stage i is on rank i. With --vocab-parallel auto, vocabulary parallelism
    is off. ``batches`` are the first batches of the corpus, which determine the padding of chunks.
    """
    layers = tuple(arguments.layers) if arguments.layers else None
    pp = arguments.pp
    if pp is None:
        if layers is None:
            raise UsageError("--pp is missing; expected the number of pipeline stages")
        pp = len(layers)
    place: tuple[int, ...] = ()
    if arguments.placement not in (None, AUTO):
        placement = _named_placement(arguments.placement, pp)
        if layers is None and placement.layers:
            layers = placement.layers
        pp, place = placement.stages, () if placement.is_even else placement.place
    cut = arguments.vocab_parallel == "on"
    if cut and pp == 1:
        raise UsageError(
            "--vocab-parallel on cuts the output layer over the stages, and there is one; expected "
            "--pp of at least 2, or leave it out"
        )
    degrees: dict[str, Any] = {"pp": pp, "cp": arguments.cp, "dp": arguments.dp}
    cost = cost_of(arguments, **degrees, layers=layers, cut=cut, place=place)
    return with_padding(cost, arguments, batches, arguments.dp)


def _named_placement(text: str, ranks: int) -> Placement:
    """Return the placement that --placement names for ``ranks`` pipeline ranks."""
    try:
        return read_placement(text, ranks, partial(bounded_text, expected=A_PLACEMENT))
    except OSError as error:
        raise UsageError(
            f"--placement {text}: {error.strerror}; expected even, v, auto, "
            "interleaved N, 'place' and the rank of every stage, or a file"
        ) from error
    except ValueError as refusal:  # from the file or the placement
        raise UsageError(f"--placement {text}: {refusal}") from refusal


def _require_open(flag: str, arguments: argparse.Namespace, cost: Cost, planner: str) -> None:
    """Raise a UsageError if the value auto of ``flag`` cannot choose the layers of the stages."""
    if arguments.layers:
        raise UsageError(
            f"--layers names the layers of every stage and {flag} auto chooses the layers of the "
            "stages; expected one of the two"
        )
    if planner not in PLANNERS:
        raise UsageError(f"{flag} auto has no effect on {planner}, which makes no pipeline plan")
    if cost.layout.stages == 1:
        raise UsageError(f"{flag} auto has no effect with one stage; leave it out")
