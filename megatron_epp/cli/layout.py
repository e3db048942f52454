"""``--pp auto`` and ``--cp auto``: the split of the devices that the first batch likes best."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence

from megatron_epp.cli import machine
from megatron_epp.cli.documents import Batches
from megatron_epp.cli.flags import AUTO
from megatron_epp.cli.machine import AUTO_PLACEMENT
from megatron_epp.cli.options import UsageError
from megatron_epp.cost.cost import Cost
from megatron_epp.planner import PLANNERS, Options, plan_step
from megatron_epp.planner.partition import layout_flags
from megatron_epp.planner.tuning.layouts import divisors
from megatron_epp.planner.tuning.partitions import partition_of
from megatron_epp.planner.tuning.placements import placement_of
from megatron_epp.planner.tuning.vocabulary import ruled_out, vocabulary_of
from megatron_epp.show.units import seconds_text, share_text

EXPECTED = 2  # batches that a partition is chosen on


def layout_cost(
    arguments: argparse.Namespace, lengths: Sequence[int], options: Options, planner: str
) -> Cost:
    """The cost in the layout that the options name, or that ``planner`` likes best for
    ``lengths``; then what was tried is said on stderr."""
    if AUTO not in (arguments.pp, arguments.cp):
        if arguments.devices is not None:
            raise UsageError(
                "--devices has no effect where --pp and --cp are numbers; leave it out, or give "
                "--pp auto or --cp auto"
            )
        return machine.planning_cost(arguments)
    cost, tried = choose_layout(arguments, lengths, options, planner)
    for pp, cp, seconds, why in tried:
        shown = why or (seconds_text(seconds) if seconds is not None else "")
        mark = " <- chosen" if (pp, cp) == (cost.stages, cost.cp) else ""
        print(f"tried pp {pp} x cp {cp}: {shown}{mark}", file=sys.stderr)
    return cost


def partitioned(
    arguments: argparse.Namespace, batches: Batches, cost: Cost, options: Options, planner: str
) -> Cost:
    """``cost`` with the layers that --partition asks for; what was chosen is said on stderr.

    The corpus's expected lengths are its first batches, as many as EXPECTED: a partition is for a
    whole run, not for the batch that is planned.
    """
    if arguments.partition == "even":
        return cost
    if arguments.layers:
        raise UsageError(
            "--layers names the layers of every stage and --partition auto chooses them"
        )
    if "uneven" in options.levers:
        raise UsageError(
            "--partition auto chooses layers for the run and the lever uneven for every batch; "
            "expected one of the two, as in --levers all,-uneven"
        )
    if planner not in PLANNERS:
        raise UsageError(
            f"--partition auto has no effect on {planner}, which makes no pipeline plan"
        )
    if cost.stages == 1:
        raise UsageError("--partition auto has no effect with one stage; leave it out")
    found = partition_of(cost, _expected(batches), options, planner)
    flags = layout_flags(found.layers, cost.pinned_layers - 1)
    said = " ".join(flags) if flags else "even layers are best; no flags of Megatron's are needed"
    print(
        f"partition: {' '.join(map(str, found.layers))} ({share_text(found.gain)} less time than "
        f"{' '.join(map(str, cost.layers))}); {said}",
        file=sys.stderr,
    )
    return dataclasses.replace(cost, layers=found.layers)


def _placed(
    arguments: argparse.Namespace, batches: Batches, cost: Cost, options: Options, planner: str
) -> Cost:
    """``cost`` with the placement and the layers that its first batches like best; what was chosen
    is said on stderr."""
    if arguments.layers or "uneven" in options.levers:
        raise UsageError(
            "--placement auto chooses the layers of the stages, too; leave --layers and the lever "
            "uneven out"
        )
    if planner not in PLANNERS:
        raise UsageError(
            f"--placement auto has no effect on {planner}, which makes no pipeline plan"
        )
    if cost.stages == 1:
        raise UsageError("--placement auto has no effect with one pipeline rank; leave it out")
    found = placement_of(cost, _expected(batches), options, planner)
    layers = " ".join(map(str, found.cost.layers))
    print(f"placement: {found.name}, layers {layers}; {found.said} (simulated)", file=sys.stderr)
    return found.cost


def _expected(batches: Batches) -> list[tuple[int, ...]]:
    """Batches that a run is expected to see."""
    return [batches[number] for number in range(1 if batches.size is None else EXPECTED)]


def with_vocabulary(
    arguments: argparse.Namespace, batches: Batches, cost: Cost, options: Options, planner: str
) -> tuple[Cost, Cost]:
    """``cost`` with the layers that --partition, the output layer that --vocab-parallel and the
    placement that --placement auto ask for, and, in front of it, as other plans have it where these
    were chosen, not asked for; what was chosen is said on stderr.

    As a partition it is chosen for a run, on the first batches of the corpus: weights lie where
    they lie.
    """
    asked = arguments.vocab_parallel
    if asked == "on" and planner not in PLANNERS:
        raise UsageError(
            f"--vocab-parallel {asked} has no effect on {planner}, which makes no pipeline plan"
        )
    cost = chosen = partitioned(arguments, batches, cost, options, planner)
    if arguments.placement == AUTO_PLACEMENT:
        chosen = _placed(arguments, batches, cost, options, planner)
    if asked != "auto" or cost.stages == 1 or planner not in PLANNERS:
        return cost, chosen
    why = ruled_out(cost)
    if why is None:
        cut = partitioned(arguments, batches, chosen.with_vocabulary(True), options, planner)
        found = vocabulary_of(chosen, _expected(batches), options, planner, cut)
        chosen, why = found.cost, f"{found.said} (simulated)"
    how = "on" if chosen.vocabulary_parallel else "off"
    print(f"vocabulary parallelism: {how}; {why}", file=sys.stderr)
    return cost, chosen


def choose_layout(
    arguments: argparse.Namespace, lengths: Sequence[int], options: Options, planner: str
) -> tuple[Cost, list[tuple[int, int, float | None, str]]]:
    """The fastest layout's cost, and what was tried: (pp, cp, seconds or None, why not)."""
    tried: list[tuple[int, int, float | None, str]] = []
    best: tuple[float, Cost] | None = None
    for pp, cp in _splits(arguments):
        arguments_here = argparse.Namespace(**{**vars(arguments), "pp": pp, "cp": cp})
        try:
            cost = machine.planning_cost(arguments_here)
            step = plan_step(lengths, cost, options, planner, arguments.dp)
        except ValueError as error:
            tried.append((pp, cp, None, str(error).split("\n")[0]))
            continue
        if not all(found.fits for found in step.planned):
            tried.append((pp, cp, step.seconds, "does not fit the budget"))
            continue
        tried.append((pp, cp, step.seconds, ""))
        if best is None or step.seconds < best[0]:
            best = step.seconds, cost
    if not tried:
        raise UsageError(
            f"--devices {arguments.devices}: no pp x cp fills them with what --pp and --cp say"
        )
    if best is None:
        reasons = "; ".join(f"pp {pp} cp {cp}: {why}" for pp, cp, _, why in tried[:3])
        raise ValueError(f"no split of the devices works ({reasons})")
    return best[1], tried


def _splits(arguments: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Every pp x cp that fills the devices and agrees with what was named."""
    if arguments.pp is None:
        raise UsageError("--pp is missing; expected the number of pipeline stages, or auto")
    if arguments.devices is None:
        raise UsageError("--devices is missing; expected how many devices auto is to split")
    group = arguments.tp * arguments.dp
    if arguments.devices % group:
        raise UsageError(f"--devices {arguments.devices}: expected a multiple of tp x dp = {group}")
    free = arguments.devices // group
    for pp in divisors(free):
        cp = free // pp
        if arguments.pp in (AUTO, pp) and arguments.cp in (AUTO, cp):
            yield pp, cp
