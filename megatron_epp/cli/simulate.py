"""The ``simulate`` command: times, bubbles and memory of a plan on a machine."""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from megatron_epp.cli import machine, recorded_settings
from megatron_epp.cli.files import read_plan, write_file
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Plan, format_records
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.show.table import text_table
from megatron_epp.show.timeline import offloaded_ratio
from megatron_epp.show.units import GIB, fraction_text, seconds_text
from megatron_epp.sim.in_step import in_step
from megatron_epp.sim.play import IdleTail, Simulation, Wait, play
from megatron_epp.sim.resident import resident_ratios

_MOST_BUBBLES = 8
_MOST_PARTS = 8


def run(arguments: argparse.Namespace) -> int:
    """Run the ``simulate`` command and return its exit status.

    Example::

        status = run(parse(["simulate", "p.plan"]))  # parse of cli.options

    Raises:
        UsageError: if the options of the machine are missing, or contradict each other or the plan.
        PlanError: if the plan is invalid or cannot run.
        ValueError: if a file cannot be read or written.
    """
    plan, settings_text, block = read_plan(arguments.plan, arguments.replica)
    taken = recorded_settings.fill_in(arguments, settings_text)
    cost = machine.plan_cost(arguments, plan)
    played = play(plan, in_step([cost.table(one) for one in block])[0])
    if arguments.output is not None:
        write_file(arguments.output, format_records(played.records))
    facts = _facts(plan, cost, played)
    if arguments.json:
        print(json.dumps(facts))
        return 0
    if taken:
        print(f"machine     {taken} (the plan's own)")
    print(_report(played, cost, facts), end="")
    return 0


def _facts(plan: Plan, cost: Cost, played: Simulation) -> dict:
    budgets = cost.device_budget_bytes
    facts = {
        "seconds": played.seconds,
        "bubble_ratio": played.bubble_ratio,
        "recompute_ratio": played.recompute_ratio,
        "comm_ratio": played.comm_ratio,
        "resident_ratios": list(resident_ratios(played)),
        "peak_bytes": list(played.peak_bytes),
        "budget_bytes": list(budgets),
        "states_bytes": list(cost.states_of_ranks),
        "idle_seconds": list(played.idle_seconds),
        "chunks": len(plan.chunks),
        "fits": all(p <= b for p, b in zip(played.peak_bytes, budgets, strict=True)),
        "bubbles": [_bubble(bubble) for bubble in played.bubbles],
        "critical_path": [{**asdict(step), "op": str(step.op)} for step in played.critical_path],
    }
    if not plan.forward_only:
        local = any(chunk.has_local for chunk in plan.chunks)
        documents = np.array(plan.documents)
        bound = lower_bound_seconds(documents, cost, local=local)
        facts["lower_bound_seconds"] = bound
        facts["gap"] = max(0.0, 1 - bound / played.seconds) if played.seconds else 0.0
    if plan.predicted is not None:
        facts["predicted_seconds"] = plan.predicted.seconds
    return facts


def _bubble(bubble: Wait | IdleTail) -> dict:
    what, number = bubble.name.split()
    facts = {what: int(number), "start": bubble.start, "stop": bubble.stop}
    if isinstance(bubble, Wait):
        return {
            **facts,
            "before": str(bubble.op),
            "waits_for": f"{bubble.awaited} of stage {bubble.source}",
            "why": bubble.why,
        }
    return {**facts, "why": f"the {what} has finished"}


def _report(played: Simulation, cost: Cost, facts: dict) -> str:
    plan = played.plan
    unit = "rank" if plan.shares_ranks else "stage"
    lines = [
        f"iteration   {seconds_text(played.seconds)}",
        f"idle        {fraction_text(played.bubble_ratio)} of {unit}s x time",
        f"recompute   {fraction_text(played.recompute_ratio)}",
        f"exposed communication  {fraction_text(played.comm_ratio)}",
    ]
    if any(ratios := facts["resident_ratios"]):
        mean = sum(ratios) / len(ratios)
        lines.append(
            f"messages pending  {fraction_text(mean)} of compute time; at most "
            f"{fraction_text(max(ratios))} of a {unit}'s"
        )
    if ratio := offloaded_ratio(played.plan):
        lines.append(f"offloaded   {fraction_text(ratio)} of what layers save")
    if "gap" in facts:
        lines.append(
            f"lower bound {seconds_text(facts['lower_bound_seconds'])}, "
            f"gap {fraction_text(facts['gap'])}"
        )
    if "predicted_seconds" in facts:
        lines.append(f"the plan says {seconds_text(facts['predicted_seconds'])}")
    rows = []
    for rank, idle in enumerate(played.idle_seconds):
        peak, budget, states = (facts[f"{of}_bytes"][rank] for of in ("peak", "budget", "states"))
        rows.append(
            [
                plan.rank_name(rank).split()[1],
                " + ".join(cost.layout.kinds.stage_text(stage) for stage in plan.stages_of(rank)),
                seconds_text(idle),
                fraction_text(idle / played.seconds if played.seconds else 0.0),
                *(f"{bytes_ / GIB:.3f}" for bytes_ in (peak, budget, states)),
                "" if peak <= budget else "OVER THE BUDGET",
            ]
        )
    headers = [unit, "layers", "idle", "idle %", "peak GiB", "budget GiB", "states GiB", ""]
    lines += [
        "",
        text_table(headers, rows).rstrip(),
        "",
        *_path(played),
        "",
        *_longest(played.bubbles),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _path(played: Simulation) -> list[str]:
    """Return the critical path, summed by op kind and stage."""
    spent: dict[str, float] = defaultdict(float)
    for step in played.critical_path:
        spent[f"{step.op.kind.value} on stage {step.stage}"] += step.stop - step.start
    between = played.seconds - sum(spent.values())
    if between > 1e-9 * played.seconds:
        spent["messages"] = between
    most = sorted(spent.items(), key=lambda entry: -entry[1])[:_MOST_PARTS]
    parts = [f"{what} {seconds_text(seconds)}" for what, seconds in most]
    return [f"critical path: {len(played.critical_path)} ops", *(f"  {part}" for part in parts)]


def _longest(bubbles: Sequence[Wait | IdleTail]) -> list[str]:
    """Return the longest bubbles with their reasons."""
    if not bubbles:
        return ["no bubbles"]
    ordered = sorted(bubbles, key=lambda bubble: bubble.start - bubble.stop)
    shown = map(bubble_text, ordered[:_MOST_BUBBLES])
    return [f"longest of {len(bubbles)} bubbles:", *(f"  {text}" for text in shown)]


def bubble_text(bubble: Wait | IdleTail) -> str:
    """Return one line that says which rank idles, for how long, and why."""
    idle = seconds_text(bubble.stop - bubble.start)
    if isinstance(bubble, IdleTail):
        return f"{bubble.name} is done {idle} before the iteration ends"
    return (
        f"{bubble.name} idles {idle} before {bubble.op}: waits for {bubble.awaited} of stage "
        f"{bubble.source} ({bubble.why})"
    )
