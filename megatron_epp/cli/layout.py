"""Choices of the auto options: partition, placement, vocabulary parallelism."""

import argparse
import sys

from megatron_epp.cli.documents import Batches
from megatron_epp.cli.machine import AUTO_PLACEMENT
from megatron_epp.cli.options import UsageError
from megatron_epp.cost.cost import Cost
from megatron_epp.planner import PLANNERS, Options
from megatron_epp.planner.choose.choice import partition_of, placement_of, ruled_out, vocabulary_of
from megatron_epp.planner.choose.partition import layout_flags
from megatron_epp.show.units import fraction_text


def chosen_costs(
    arguments: argparse.Namespace, batches: Batches, cost: Cost, options: Options, planner: str
) -> tuple[Cost, Cost]:
    """Return two cost models: with the choice of --partition auto, and with all auto choices.

    Only the second cost model has the choices of --placement auto and --vocab-parallel auto. This
    function prints all choices on stderr. As in training, the choices depend on the first batches
    of the corpus, not on the planned batch.

    Args:
        arguments: options of the command.
        batches: batches of the corpus.
        cost: cost model of the layout.
        options: options of the planner.
        planner: name of the planner.

    Raises:
        UsageError: if an option has no effect, or two options decide the same setting.
    """
    asked = arguments.vocab_parallel
    if asked == "on" and planner not in PLANNERS:
        raise UsageError(
            f"--vocab-parallel {asked} has no effect on {planner}, which makes no pipeline plan"
        )
    if arguments.partition != "even":
        _require_open("--partition", arguments, cost, options, planner)
        cost = _partitioned(cost, batches, options, planner)
    chosen = cost
    if arguments.placement == AUTO_PLACEMENT:
        _require_open("--placement", arguments, cost, options, planner)
        placement = placement_of(cost, batches.first, options, planner)
        chosen = placement.cost
        print(
            f"placement: {placement.key}, layers {' '.join(map(str, chosen.layout.layers))}; "
            f"{placement.comparison} (simulated)",
            file=sys.stderr,
        )
    if asked != "auto" or cost.layout.stages == 1 or planner not in PLANNERS:
        return cost, chosen
    why = ruled_out(cost)
    if why is None:
        cut = chosen.with_vocabulary(True)
        if arguments.partition != "even":
            cut = _partitioned(cut, batches, options, planner)
        vocabulary = vocabulary_of(chosen, batches.first, options, planner, cut)
        chosen, why = vocabulary.cost, f"{vocabulary.comparison} (simulated)"
    how = "on" if chosen.layout.vocabulary_parallel else "off"
    print(f"vocabulary parallelism: {how}; {why}", file=sys.stderr)
    return cost, chosen


def _require_open(
    flag: str, arguments: argparse.Namespace, cost: Cost, options: Options, planner: str
) -> None:
    """Raise a UsageError if the value auto of ``flag`` cannot choose the layers of the stages."""
    if arguments.layers:
        raise UsageError(
            f"--layers names the layers of every stage and {flag} auto chooses the layers of the "
            "stages; expected one of the two"
        )
    if "uneven" in options.levers:
        raise UsageError(
            f"{flag} auto chooses layers for the run and the lever uneven for every batch; "
            "expected one of the two, as in --levers all,-uneven"
        )
    if planner not in PLANNERS:
        raise UsageError(f"{flag} auto has no effect on {planner}, which makes no pipeline plan")
    if cost.layout.stages == 1:
        raise UsageError(f"{flag} auto has no effect with one stage; leave it out")


def _partitioned(cost: Cost, batches: Batches, options: Options, planner: str) -> Cost:
    """Return ``cost`` with layers balanced by time; print them, as numbers and Megatron's flags."""
    partition = partition_of(cost, batches.first, options, planner)
    flags = layout_flags(partition.key, cost.layout.pinned_layers - 1)
    said = " ".join(flags) if flags else "even layers are best; no flags of Megatron's are needed"
    print(
        f"partition: {' '.join(map(str, partition.key))} ({fraction_text(partition.gain)} less "
        f"time than {' '.join(map(str, cost.layout.layers))}); {said}",
        file=sys.stderr,
    )
    return partition.cost
