"""The ``plan`` command: the plan of one batch, with predicted time and memory."""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable, Sequence

from megatron_epp.cli import recorded_settings
from megatron_epp.cli.documents import Batches, open_batches
from megatron_epp.cli.files import write_file
from megatron_epp.cli.layout import AUTO, named_layout_cost, run_cost
from megatron_epp.cli.machine import padding_text, with_padding
from megatron_epp.cli.options import UsageError
from megatron_epp.cli.outcome import Outcome, known_planner, outcome
from megatron_epp.cli.progress import Workers
from megatron_epp.corpus.overlong import Counts
from megatron_epp.cost.catalogue.accuracy import accuracy_lines
from megatron_epp.cost.catalogue.devices import device
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.host_memory import host_peak_bytes
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Plan, Step
from megatron_epp.planner.feasibility import late_plans
from megatron_epp.planner.options import Options, default_levers, parse_levers
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.planner.replicas import evaluation_step
from megatron_epp.planner.result import PlannedReplica
from megatron_epp.show.timeline import local_fraction, offloaded_ratio
from megatron_epp.show.units import GIB, fraction_text, seconds_text, tokens_text
from megatron_epp.sim.exchange import exchange, messages
from megatron_epp.sim.play import play


def run(arguments: argparse.Namespace) -> int:
    """Run the ``plan`` command and return its exit status.

    Example::

        options = ["plan", "--lengths", "wlb", "--model", "llama3-8b", "--device", "h100-80g"]
        status = run(parse([*options, "--pp", "4", "--tp", "8", "-o", "p.plan"]))  # cli.options

    Raises:
        ValueError: if the corpus cannot be used, or the batch cannot be planned.
        UsageError: if options are missing or contradict each other.
    """
    planner = known_planner(arguments.planner)
    options = options_of(arguments)
    require_sharing(arguments, () if arguments.forward_only else (planner,))
    named = named_layout_cost(arguments, planner)  # before the corpus is read, which may take long
    if planner in PLANNERS and arguments.placement not in (None, AUTO):
        PLANNERS[planner].require_place(named.layout.placement.place)
    batches = open_batches(arguments, [arguments.batch], named.layout.predictions - 1)
    lengths = batches[arguments.batch]
    padded = with_padding(named, arguments, batches.first, arguments.dp)
    cost = run_cost(arguments, padded, batches, options, planner)
    if arguments.forward_only:
        return _evaluation(arguments, lengths, cost, options)
    job = arguments.batch, batches.forest(arguments.batch), cost, options, planner, arguments.dp
    with Workers() as workers:
        result = outcome(*job, run=workers.watched("replicas"))
    text = _text(result.step)
    if arguments.output is not None:
        if text is None:
            raise UsageError(
                f"-o: planner {planner} makes no pipeline plan, so there is none to write"
            )
        write_file(arguments.output, recorded_settings.comment(arguments, cost) + text)
    if arguments.json:
        facts = result.facts()
        facts["tokens"] = sum(lengths)
        facts["documents"] = len(lengths)
        facts["multiple"] = cost.multiple
        facts["read"] = _read(batches.corpus.counts)
        facts["plan"] = text
        print(json.dumps(facts))
        return 0
    # Without a file the plan itself goes to stdout, so that it can be piped.
    report = sys.stderr if arguments.output is None and text is not None else sys.stdout
    if arguments.output is None and text is not None:
        sys.stdout.write(text)
        sys.stdout.flush()
    print(_summary(result, batches, lengths, cost), end="", file=report)
    if line := result.slow_host_line(cost, options):
        print(line, file=report)
    if arguments.output is not None:
        print(f"wrote {arguments.output}", file=report)
    return 0


def _read(counts: Counts) -> dict[str, int]:
    """Return the field ``read`` of ``plan --json``: sequences by --overlong effect, lost tokens."""
    others = ("skipped", "truncated", "dropped", "split", "lost_tokens")
    return {"read": counts.sequences, **{name: getattr(counts, name) for name in others}}


def options_of(arguments: argparse.Namespace) -> Options:
    """Return the planner's options.

    Raises:
        UsageError: if an option has no effect, or two options contradict each other.
        ValueError: as :func:`levers_of`.
    """
    levers = levers_of(arguments)
    if arguments.host_memory_gib is not None and "offload" not in levers:
        raise UsageError(
            "--host-memory-gib has no effect without the lever offload; expected --levers "
            "default,offload, all or, on a GPU, default"
        )
    lockstep = _lockstep(arguments)
    if lockstep > 1 and arguments.vocab_parallel == "on":
        raise UsageError(
            "--vocab-parallel on: as in training, not with replicas that share experts; leave it "
            "out, or give an --ep that divides --tp times --cp"
        )
    if "local" in map(str.strip, arguments.levers.split(",")):
        if lockstep > 1:
            raise UsageError(
                "--levers local: replicas in lockstep (--ep) have all documents sharded over the "
                "context-parallel ranks; leave it out"
            )
        if arguments.cp == 1:
            raise UsageError(
                "--levers local has no effect with one context-parallel rank; expected --cp above 1"
            )
    options = Options(arguments.context, levers, lockstep=lockstep)
    if arguments.effort is not None:
        options = dataclasses.replace(options, effort=arguments.effort)
    return options


def require_sharing(arguments: argparse.Namespace, planners: Iterable[str]) -> None:
    """Raise a UsageError if none of ``planners`` makes plans with shared prefixes."""
    if arguments.share_from is not None and not any(
        name in PLANNERS and PLANNERS[name].takes_prefixes for name in planners
    ):
        raise UsageError(
            "--share-from has no effect: only planner epp computes shared prefixes once, and no "
            "forward-only plan does; leave it out"
        )


def levers_of(arguments: argparse.Namespace) -> frozenset[str]:
    """Return the levers of --levers; by default, those of training on the device.

    Raises:
        ValueError: if a lever or the device is unknown, --levers names no lever, or the file of the
            device or of the cost model is missing or invalid.
    """
    name = "cpu"  # default if no machine is named
    if file := getattr(arguments, "cost_model", None):  # tune has no such option
        name = Profile.load(file).provenance.device
    elif arguments.device:
        name = device(arguments.device).name
    return parse_levers(
        arguments.levers, default_levers(name, arguments.host_memory_gib is not None)
    )


def _lockstep(arguments: argparse.Namespace) -> int:
    """Return the size of a lockstep group: the replicas that share experts."""
    lockstep = max(1, (arguments.ep or 1) // (arguments.tp * arguments.cp))
    if arguments.dp % lockstep:
        raise UsageError(
            f"--ep: {lockstep} replicas in lockstep; expected a divisor of --dp {arguments.dp}"
        )
    return lockstep


def _shared_text(step: Step | None, tokens: int) -> str:
    """Return a note on the tokens that the plans compute once instead of several times."""
    computed = tokens if step is None else sum(plan.tokens for plan in step.plans)
    return f"; {tokens_text(computed)} with shared prefixes once" if computed < tokens else ""


def _text(step: Step | None) -> str | None:
    """Return the text of the plan if there is one replica, else the text of the step."""
    if step is None:
        return None
    if len(step.plans) == 1 and not step.plans[0].prefixes:
        return str(step.plans[0])
    return str(step)


def _summary(result: Outcome, batches: Batches, lengths: tuple[int, ...], cost: Cost) -> str:
    replica = result.slowest
    peaks = " ".join(f"{peak / GIB:.2f}" for peak in result.peak_bytes)
    budgets = " ".join(f"{budget / GIB:.2f}" for budget in dict.fromkeys(cost.device_budget_bytes))
    offloaded, host = 0.0, ""
    plan = replica.plan if isinstance(replica, PlannedReplica) else None
    if plan is not None:
        offloaded = offloaded_ratio(plan)
        taken = (f"{peak / GIB:.2f}" for peak in host_peak_bytes(cost, plan))
        host = f"; on the host {' '.join(taken)} GiB of each device"
    local = 0.0 if plan is None else local_fraction(plan)
    overlapped = [] if plan is None else _overlapped(plan, cost)
    lines = [
        f"lengths     {batches}",
        f"batch {result.batch:<5} {len(lengths)} documents, {tokens_text(sum(lengths))} tokens"
        + _shared_text(result.step, sum(lengths)),
        f"machine     {cost.layout}"
        + (f", ep {cost.layout.ep}" if cost.layout.ep > 1 else "")
        + (", vocabulary over the stages" if cost.layout.vocabulary_parallel else ""),
        *([f"stages      on ranks {cost.layout.placement}"] if cost.layout.place else []),
        *([f"layers      {cost.layout.kinds_text}"] if cost.layout.kinds_text else []),
        *([f"padding     {padding}"] if (padding := padding_text(cost)) else []),
        f"planner     {result.planner}, planned in {seconds_text(result.plan_seconds)}",
        *([f"            {late}"] if (late := late_text([result], cost)) else []),
        *([f"how         {replica.note}"] if replica.note else []),
        f"iteration   {seconds_text(result.seconds)}; lower bound "
        f"{seconds_text(result.lower_bound_seconds)}, gap {fraction_text(result.gap)}",
        f"of the time bubbles {fraction_text(replica.bubble_ratio)}, recompute "
        f"{fraction_text(replica.recompute_ratio)}, communication within ops "
        f"{fraction_text(replica.comm_ratio)}",
        *overlapped,
        *[f"offloaded   {fraction_text(offloaded)} of what layers save{host}"] * (offloaded > 0),
        *[f"local       {fraction_text(local)} of the tokens, each on one CP rank"] * (local > 0),
        f"chunks      {replica.chunks}"
        + (f" in {replica.pipelines} pipelines" if replica.pipelines > 1 else ""),
        *_lockstep_lines(result),
        f"peak GiB    {peaks} of {budgets}" + ("" if result.fits else "  OVER THE BUDGET"),
        *accuracy_lines(cost),
    ]
    return "\n".join(lines) + "\n"


def late_text(outcomes: Sequence[Outcome], cost: Cost) -> str | None:
    """Return a warning if training with several replicas would wait for plans, else None."""
    slowest = [each.slowest for each in outcomes if len(each.replicas) > 1]
    if not slowest:
        return None
    plan_seconds, seconds = (
        statistics.median(getattr(each, name) for each in slowest)
        for name in ("plan_seconds", "seconds")
    )
    return late_plans(cost, plan_seconds, seconds)


def _lockstep_lines(result: Outcome) -> list[str]:
    """Return a line on lockstep, if replicas share experts."""
    if result.step is None or result.step.lockstep == 1:
        return []
    empty = sum(not chunk.spans for plan in result.step.plans for chunk in plan.chunks)
    return [f"lockstep    blocks of {result.step.lockstep} replicas, {empty} chunks empty"]


def _overlapped(plan: Plan, cost: Cost) -> list[str]:
    """Return lines on total and exposed time of messages and of data-parallel communication."""
    table = cost.table(plan)
    played = play(plan, table)
    lines = []
    if cost.layout.stages > 1 and cost.layout.profile.link_seconds_per_token:
        traffic = messages(plan, table, played)
        lines.append(
            f"messages    between stages {seconds_text(traffic.seconds)} on all links, "
            f"{seconds_text(traffic.exposed_seconds)} of the iteration exposed"
        )
    between = exchange(cost, played)
    if between.seconds:
        lines.append(
            f"replicas    exchange {seconds_text(between.seconds)}, of which "
            f"{seconds_text(between.exposed_seconds)} exposed come on top of the iteration"
        )
    return lines


def _evaluation(
    arguments: argparse.Namespace, lengths: tuple[int, ...], cost: Cost, options: Options
) -> int:
    step = evaluation_step(lengths, cost, options, arguments.dp)
    text = _text(step)
    assert text is not None
    if arguments.output is not None:
        write_file(arguments.output, recorded_settings.comment(arguments, cost) + text)
        print(f"wrote {arguments.output}")
    else:
        sys.stdout.write(text)
    return 0
