"""``python -m megatron_epp certify --loop level0|level1``: training loops of others.

Random micro-batches with a loss per token, a mean, or ratios clipped per sequence go through
``get_forward_backward_func`` as a loop calls it, and are run by arbitrary plans: level0 whole
micro-batches in any order, level1 slices of their documents. Compared in float64 with Megatron's
model on every document alone and the same loss: every micro-batch's value, at its place, and every
parameter's gradient.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from megatron_epp.certify.command import (
    BOUND,
    Trial,
    conclusion,
    issued,
    read,
    require_prepared,
    table_row,
)
from megatron_epp.certify.compare import worst_gradient
from megatron_epp.certify.loops.micro_batches import (
    LoopFrame,
    draw_micro_batches,
    loop_frame,
)
from megatron_epp.certify.loops.results import LoopComputed, LoopReference
from megatron_epp.certify.processes import ChildLost, Children
from megatron_epp.certify.protocol import PLAIN, Backend, Failed, Prepared, Role
from megatron_epp.control.files import scratch_folder

LEVELS = ("level0", "level1")


@dataclass(frozen=True, slots=True)
class LoopJudged:
    """One batch: what it made the schedule do, and how far it is from the plain model."""

    number: int
    loss: str
    micro_batches: int
    chunks: int = 0
    cut: int = 0
    halved: int = 0
    messages: int = 0
    value_error: float = float("inf")
    gradient_error: float = float("inf")
    parameter: str = ""
    collectives: Counter[str] = field(default_factory=Counter)
    problems: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems and max(self.value_error, self.gradient_error) <= BOUND


def main(backend: Backend, arguments: Sequence[str] | None = None) -> int:
    """0: certified; 1: not. ValueError: input that cannot be used."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--loop", default="level0")
    chosen, rest = parser.parse_known_args(arguments)
    if chosen.loop not in LEVELS:
        raise ValueError(f"--loop {chosen.loop}: expected {' or '.join(LEVELS)}")
    trial = read(rest)
    if chosen.loop == "level1" and trial.degrees.cp > 1:
        raise ValueError(
            f"--loop level1 --cp {trial.degrees.cp}: a forward step that takes its own part of a "
            "micro-batch over context-parallel ranks cannot be handed a slice; certify --loop "
            "level0, or --epp (without --loop), with --cp"
        )
    try:
        judged = certify_loop(backend, trial, chosen.loop, lambda line: print(line, flush=True))
    except ChildLost as error:
        print(f"not certified: {error}")
        return 1
    print(loop_verdict(judged))
    return 0 if all(batch.passed for batch in judged) else 1


def certify_loop(
    backend: Backend, trial: Trial, level: str, show: Callable[[str], None] = lambda line: None
) -> list[LoopJudged]:
    """Run the batches of ``trial`` by ``backend``, telling ``show`` line by line. Its models are
    taken in turn, with losses per micro-batch and per token by turns. It stops where a rank fails
    among several.

    ValueError: flags that cannot be used. ChildLost: a process that died or stayed silent.
    """
    judged: list[LoopJudged] = []
    with ExitStack() as until_the_end:
        folder = until_the_end.enter_context(scratch_folder("certify"))
        ranks = trial.degrees.ranks
        roles = [
            Role(one, ranks, trial.seed, folder, trial.patience_seconds, trial.interfere, loop=True)
            for one in (PLAIN, *range(ranks))
        ]
        children = until_the_end.enter_context(Children(roles, backend))
        turns = max(2, len(trial.models))
        for index in range(min(turns, trial.batches)):
            flags = trial.models[index % len(trial.models)]
            prepared, frame = _prepare(children, flags, trial, bool(index % 2), level)
            show(f"{trial.degrees}, {level}: {prepared.description}")
            if index == 0:
                show(LOOP_HEADER)
            for number in range(index, trial.batches, turns):
                judged.append(_batch(children, number // turns, number, frame, trial))
                show(loop_row(judged[-1]))
                if judged[-1].problems and ranks > 1:
                    return judged
    return judged


def _prepare(
    children: Children, flags: tuple[str, ...], trial: Trial, per_token: bool, level: str
) -> tuple[Prepared, LoopFrame]:
    sliced = level == "level1"
    prepared = children.ask(
        [PLAIN],
        "prepare_loop",
        flags,
        trial.degrees,
        trial.overlap,
        trial.lora_rank,
        per_token,
        sliced,
    )[PLAIN]
    require_prepared(prepared)
    frame = loop_frame(prepared.frame, trial.degrees, per_token, sliced)
    ranks = range(trial.degrees.ranks)
    answers = children.ask(
        ranks, "prepare_loop", prepared.args, frame, prepared.weights, trial.lora_rank
    )
    require_prepared(*answers.values())
    return prepared, frame


def _batch(
    children: Children, drawn_number: int, number: int, frame: LoopFrame, trial: Trial
) -> LoopJudged:
    answers = children.ask([PLAIN, *range(trial.degrees.ranks)], "compute_loop", drawn_number)
    drawn = draw_micro_batches(trial.seed, drawn_number, frame)
    count = sum(map(len, drawn.micro_batches))
    failures = [answer.reason for answer in answers.values() if isinstance(answer, Failed)]
    if failures:
        return LoopJudged(number, drawn.loss, count, problems=tuple(failures))
    reference = answers.pop(PLAIN)
    computed = list(answers.values())
    worst = worst_gradient(
        (part for one in computed for part in one.gradients), reference.gradients
    )
    return LoopJudged(
        number,
        drawn.loss,
        count,
        chunks=sum({one.replica: one.chunks for one in computed}.values()),
        cut=sum({one.replica: one.cut for one in computed}.values()),
        halved=sum({one.replica: one.halved for one in computed}.values()),
        messages=sum(one.messages for one in computed) // 2,
        value_error=_value_error(computed, reference),
        gradient_error=worst.error,
        parameter=worst.name,
        collectives=sum((one.collectives for one in computed), Counter()),
        problems=tuple(problem for one in computed for problem in one.problems),
    )


def _value_error(computed: Sequence[LoopComputed], reference: LoopReference) -> float:
    """The largest error of what was returned of a micro-batch, in training and in a pass of
    forwards, at its place; infinite where one is missing."""
    worst, told = 0.0, set()
    for one in computed:
        if not one.values:
            continue
        told.add(one.replica)
        for found, wanted in (
            (one.values, reference.values[one.replica]),
            (one.collected, reference.sums[one.replica]),
        ):
            if len(found) != len(wanted):
                return float("inf")
            scale = max(1e-3, *map(abs, wanted))
            errors = [abs(a - b) / scale for a, b in zip(found, wanted, strict=True)]
            worst = max(worst, *errors)
    return worst if told == set(range(len(reference.values))) else float("inf")


# ------------------------------------------------------------------ what is printed

_COLUMNS = (
    ("batch", 5),
    ("loss", 8),
    ("micro-batches", 13),
    ("chunks", 6),
    ("slices", 6),
    ("I+W", 4),
    ("messages", 8),
    ("value error", 11),
    ("gradient", 8),
)
LOOP_HEADER = "  ".join(name.rjust(width) for name, width in _COLUMNS) + "  worst parameter"


def loop_row(judged: LoopJudged) -> str:
    """One line of the table; a batch that failed says why."""
    cells = [
        str(judged.number),
        judged.loss,
        str(judged.micro_batches),
        str(judged.chunks),
        str(judged.cut),
        str(judged.halved),
        str(judged.messages),
        f"{judged.value_error:.1e}",
        f"{judged.gradient_error:.1e}",
    ]
    return table_row(_COLUMNS, cells, judged.parameter, judged.problems)


def loop_verdict(judged: Sequence[LoopJudged]) -> str:
    """The last lines: what was run, and whether it is certified."""
    losses = Counter(batch.loss for batch in judged)
    lines = [
        f"losses: {', '.join(f'{name} {count}' for name, count in sorted(losses.items()))}; "
        f"{sum(batch.chunks for batch in judged)} chunks of "
        f"{sum(batch.micro_batches for batch in judged)} micro-batches, "
        f"{sum(batch.halved for batch in judged)} backwards in two halves",
        issued(batch.collectives for batch in judged),
        conclusion(
            {batch.number: batch.passed for batch in judged},
            max(max(batch.value_error, batch.gradient_error) for batch in judged),
            "values in the caller's order, collectives all on the list",
        ),
    ]
    return "\n".join(lines)
