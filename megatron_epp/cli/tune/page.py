"""HTML page of a layout search: all rows, memory and timeline of one row, gain by context."""

import dataclasses
from collections.abc import Sequence

from megatron_epp.cli.documents import Batches
from megatron_epp.cli.progress import Workers, bar
from megatron_epp.cli.tune.describe import NOT_PLANNED, flags_text
from megatron_epp.cli.tune.job import TunedJob
from megatron_epp.cli.tune.report import runs, shown_rows, survey_verdict
from megatron_epp.cli.tune.script import launch_flags
from megatron_epp.cli.tune.stock_job import connections
from megatron_epp.cost.catalogue.accuracy import accuracy_lines
from megatron_epp.cost.catalogue.megatron_flags import model_flags
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import STOCK
from megatron_epp.planner.tuning.parts import memory_parts
from megatron_epp.planner.tuning.survey import ELASTIC, Choice, Survey, replanned
from megatron_epp.show.survey_page import GainPoint, SurveyPage, to_page
from megatron_epp.show.timeline import Timeline, timeline_of
from megatron_epp.sim.play import play

_CONTEXTS, _LEAST_CONTEXT = 6, 4096
_TRIED = 3  # number of best choices of a planner that are tried at each context


def survey_page(
    job: TunedJob,
    result: Survey,
    row: int,
    batches: Batches,
    lengths: Sequence[int],
    options: Options,
    workers: Workers,
) -> str:
    """Return the page as HTML.

    Args:
        job: devices and model.
        result: result of the search.
        row: number of the row that the pictures show.
        batches: batches of the corpus.
        lengths: document lengths of the batch that the pictures show.
        options: options of the planner.
        workers: worker processes that plan the gain by context.
    """
    rows, chosen = result.choices[: max(job.arguments.top, row)], result.choices[row - 1]
    context = options.context or max(lengths)
    headers, cells = shown_rows(rows, [job.mfu(each, [lengths]) for each in rows], True)
    of_model = model_flags(job.model, job.config)
    flags: list[tuple[str, str]] = []
    notes = list(job.config.notes if job.config is not None else ())
    for number, each in enumerate(() if of_model.unsaid else rows, 1):
        try:
            groups = launch_flags(job, each, len(lengths), context)
        except ValueError as error:
            notes.append(f"Row {number}, {runs(each)}, has no flags: {error}.")
            flags.append(("", ""))
            continue
        title = f"flags of row {number}, with CUDA_DEVICE_MAX_CONNECTIONS={connections(job, each)}"
        flags.append((title, flags_text([word for group in groups for word in group])))
    if any(each.stock is not None for each in rows):
        notes.append("Without --epp, Megatron cuts documents at the ends of samples.")
    quick = dataclasses.replace(options, effort=0)
    packed = _try(job, chosen, STOCK, lengths, quick)
    planned = _try(job, chosen, ELASTIC, lengths, options)
    if of_model.assumed:
        notes.append(f"Not said of the model, so taken: {', '.join(of_model.assumed)}.")
    if of_model.unsaid:
        notes.append(f"Megatron's flags cannot say: {'; '.join(of_model.unsaid)}.")
    assert chosen.plan is not None and chosen.cost is not None
    return to_page(
        SurveyPage(
            title=f"{job.model.name} on {job}",
            verdict=survey_verdict(result),
            error=accuracy_lines(chosen.cost),
            headers=headers,
            rows=cells,
            chosen=row - 1,
            flags=flags,
            parts=memory_parts(chosen.plan, chosen.cost),
            budgets=chosen.cost.device_budget_bytes,
            packed=_timeline(packed, "packed"),
            planned=_timeline(planned, "planned"),
            gains=_gains(job, result, chosen, lengths, context, quick, workers),
            lengths=[length for batch in batches.first for length in batch],
            context=context,
            notes=[*notes, f"Not planned: {NOT_PLANNED}."],
        )
    )


def _timeline(choice: Choice | None, title: str) -> Timeline | None:
    if choice is None or choice.plan is None or choice.cost is None:
        return None
    plan, cost = choice.plan, choice.cost
    return timeline_of(play(plan, cost.table(plan)), title, cost.device_budget_bytes)


def _try(
    job: TunedJob, choice: Choice, planner: str, lengths: Sequence[int], options: Options
) -> Choice | None:
    """Plan ``lengths`` by ``planner`` in the layout of ``choice``; return None if no plan fits."""
    cost = job.cost_for(choice.layout)
    if not planner == choice.planner == ELASTIC:
        choice = dataclasses.replace(
            choice,
            layers=cost.layout.layers,
            planner=planner,
            offload="offload" in options.levers,
            vocabulary_parallel=False,
            place=(),
        )
    try:
        return replanned(choice, cost, [lengths], options)
    except ValueError:
        return None


def _seconds(*work: object) -> float | None:
    choice = _try(*work)  # type: ignore[arg-type]
    return None if choice is None else choice.seconds


def _gains(
    job: TunedJob,
    result: Survey,
    chosen: Choice,
    lengths: Sequence[int],
    context: int,
    options: Options,
    workers: Workers,
) -> list[GainPoint]:
    """Return the gain over packing at ``context``, ``context`` / 2, ... (up to 6, down to 4096)."""
    contexts = sorted({max(1, context >> n) for n in range(_CONTEXTS)})
    contexts = [each for each in contexts if each >= min(_LEAST_CONTEXT, context)]
    best = {
        planner: [each for each in result.choices if (each.planner == ELASTIC) == elastic][:_TRIED]
        for planner, elastic in ((ELASTIC, True), (STOCK, False))
    }
    tasks, keys = [], []
    for at in contexts:
        short = tuple(min(length, at) for length in lengths)
        here = dataclasses.replace(options, context=at)
        pairs = [(each, each.planner) for several in best.values() for each in several]
        for each, planner in (*pairs, (chosen, ELASTIC), (chosen, STOCK)):
            tasks.append((job, each, planner, short, here))
            keys.append((at, planner, each is chosen))
    seconds_of: dict[tuple[int, str, bool], float] = {}
    for key, seconds in zip(keys, bar(workers(_seconds, tasks), len(tasks), "gain"), strict=True):
        for both in {key, (*key[:2], False)}:
            if seconds is not None:
                seconds_of[both] = min(seconds, seconds_of.get(both, seconds))
    points = []
    for at in contexts:
        same, every = (
            [seconds_of.get((at, p, own)) for p in (STOCK, ELASTIC)] for own in (True, False)
        )
        ratios = [one / other if one and other else None for one, other in (same, every)]
        points.append(GainPoint(at, *ratios))
    return points
