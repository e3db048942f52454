"""Gradients of random plans against the reference model: ``python -m megatron_epp certify``.

A ``Frame`` draws batches, and ranks run them with random plans. The parent process
compares the ranks' results with those of the reference model.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from textwrap import fill

from megatron_epp.certify.batches import Frame, StepCoverage
from megatron_epp.certify.compare import WorstGradient, worst_gradient
from megatron_epp.certify.processes import ChildLost, Children
from megatron_epp.certify.protocol import (
    REFERENCE,
    Backend,
    InputRefusal,
    ModelSetup,
    RankResult,
    Reference,
    RequestFailure,
    Role,
)
from megatron_epp.certify.trial import Trial, read
from megatron_epp.control.files import scratch_folder
from megatron_epp.show.table import COLUMNS

BOUND = 1e-12  # relative, in float64
# In bf16, as a multiple of the reference model's own error: two computations in one dtype both have
# such an error, in any direction.
OWN_BOUND = 2.0
# For gradients of weights with fp8 products, in the 2-norm. Other gradients have no such error,
# because blocks along a row do not depend on the other rows. A plan determines which rows share a
# block's scale: the power of two s with 224 s < amax <= 448 s. In e4m3 a number keeps its digits
# for any such scale down to 2^-6 s, and is a multiple of 2^-9 s below. Two ways of slicing
# therefore differ by at most 2 * 2^-10 s: relative to the block's largest number by 2 * 2^-10 / 224
# (in e5m2 by 5e-10). A line of the gradient changes by at most that fraction of what the largest
# number adds to it, once for each factor. Few numbers are that small, and their errors are random.
QUANTISED_BOUND = 2 * 2 * 2.0**-10 / 224


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """Result of one batch: its coverage, and its distance from the reference model.

    Attributes:
        number: number of the batch.
        coverage: numbers of chunks, ops and other items in the batch.
        loss_error: error of the loss.
        gradient_error: largest error of a gradient, except gradients of fp8 weights.
        parameter: parameter with the largest error.
        problems: failures, and deviations from the plan.
        routing: differences between routers (trainer_results.py).
        bound: largest allowed ``loss_error`` and ``gradient_error``: BOUND for relative errors,
            OWN_BOUND for errors in units of the reference model's own error (protocol.py).
        quantised_error: largest error of a gradient of fp8 weights, whose bound is
            QUANTISED_BOUND; None without fp8 weights.
    """

    number: int
    coverage: StepCoverage
    loss_error: float = float("inf")
    gradient_error: float = float("inf")
    parameter: str = ""
    problems: tuple[str, ...] = ()
    routing: tuple[str, ...] = ()
    bound: float = BOUND
    quantised_error: float | None = None

    @property
    def passed(self) -> bool:
        """Whether all errors are within their bounds and no problem occurred."""
        fine = not self.problems and not self.routing
        fine = fine and (self.quantised_error or 0.0) <= QUANTISED_BOUND
        return fine and self.loss_error <= self.bound and self.gradient_error <= self.bound


def main(backend: Backend, arguments: Sequence[str] | None = None) -> int:
    """Run the ``certify`` command.

    Args:
        backend: functions with which the processes compute.
        arguments: the command line after ``certify``; None takes ``sys.argv``.

    Returns:
        0 if everything is certified, else 1.

    Raises:
        ValueError: if an input cannot be used.

    Example::

        status = main(MEGATRON, ["--pp", "2", "--batches", "4"])  # mcore.certify.backend
    """
    return run(backend, read(arguments))


def run(backend: Backend, trial: Trial) -> int:
    """Run ``trial`` and print its table; return 0 if everything is certified, else 1."""
    try:
        checked = certify(backend, trial, _print)
    except ChildLost as error:
        print(f"not certified: {error}")
        return 1
    _print(verdict(checked))
    return 0 if all(batch.passed for batch in checked) else 1


def _print(text: str) -> None:
    """Print lines of at most COLUMNS columns; what follows in a line is indented."""
    for line in text.splitlines():
        print(
            fill(
                line,
                COLUMNS,
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            ),
            flush=True,
        )


def certify(
    backend: Backend, trial: Trial, show: Callable[[str], None] = lambda line: None
) -> list[BatchVerdict]:
    """Run the batches of ``trial``, and pass each line of output to ``show``.

    ``backend`` contains the functions with which the processes compute. The first batch in which a
    rank has a problem is the last one that runs, unless there is only one rank.

    Raises:
        ValueError: if flags cannot be used.
        ChildLost: if a process dies or does not answer.
    """
    checked: list[BatchVerdict] = []
    with ExitStack() as until_the_end:
        folder = until_the_end.enter_context(scratch_folder("certify"))
        if notice := backend.choose_engine(trial):
            show(notice)
        roles = [Role(one, folder, trial) for one in (REFERENCE, *range(trial.degrees.ranks))]
        children = until_the_end.enter_context(Children(roles, backend))
        for turn in range(min(trial.turns, trial.batches)):
            prepared = _prepare(children, turn, trial)
            show(f"{trial.title}: {prepared.description}")
            for number in range(turn, trial.batches, trial.turns):
                checked.append(_batch(children, number, prepared.frame, trial))
                if len(checked) == 1:
                    show(header(checked[0]))
                show(row(checked[-1]))
                if checked[-1].problems and trial.degrees.ranks > 1:
                    return checked
    return checked


def _prepare(children: Children, turn: int, trial: Trial) -> ModelSetup:
    (prepared,) = _required(children.ask([REFERENCE], "prepare", turn))
    _required(children.ask(range(trial.degrees.ranks), "prepare", prepared))
    return prepared


def _required[T](answers: Mapping[int, T | InputRefusal | RequestFailure]) -> list[T]:
    """Return the answers; raise a ValueError for a refusal, a ChildLost for a failure."""
    results: list[T] = []
    for answer in answers.values():
        if isinstance(answer, InputRefusal):
            raise ValueError(answer.reason)
        if isinstance(answer, RequestFailure):
            raise ChildLost(f"{answer.reason}\n{answer.traceback}")
        results.append(answer)
    return results


def _batch(children: Children, number: int, frame: Frame, trial: Trial) -> BatchVerdict:
    answers = children.ask(children.roles, "compute", number)
    drawn = frame.draw(trial.seed, number)
    failures = [answer.reason for answer in answers.values() if isinstance(answer, RequestFailure)]
    if failures:
        return BatchVerdict(number, frame.coverage(drawn, ()), problems=tuple(failures))
    reference, computed = answers.pop(REFERENCE), list(answers.values())
    exact, quantised = reference.own is None, None
    worst = _worst(reference, computed, lambda key: key not in reference.quantised)
    if reference.quantised:
        rounded = _worst(reference, computed, lambda key: key in reference.quantised, True)
        quantised = rounded.error
        if quantised / QUANTISED_BOUND > worst.error / BOUND:
            worst = replace(worst, name=rounded.name)
    return BatchVerdict(
        number,
        frame.coverage(drawn, computed),
        loss_error=reference.loss_error(computed),
        gradient_error=worst.error,
        parameter=worst.name,
        problems=tuple(problem for one in computed for problem in one.problems),
        # In bf16 router logs show nothing that gradients do not.
        routing=tuple(reference.routing_differences(computed, BOUND if exact else float("inf"))),
        bound=BOUND if exact else OWN_BOUND,
        quantised_error=quantised,
    )


def _worst(
    reference: Reference,
    computed: Sequence[RankResult],
    counts: Callable[[str], bool],
    rounded: bool = False,
) -> WorstGradient:
    """Return the largest error of the gradients whose keys satisfy ``counts``.

    ``rounded`` is whether these are gradients of fp8 weights (:func:`worst_gradient`).
    """
    parts = (part for one in computed for part in one.gradients if counts(part.key))
    expected = {key: tensor for key, tensor in reference.gradients.items() if counts(key)}
    return worst_gradient(parts, expected, reference.own, rounded)


_WIDTHS = {"loss": 8, "I+W": 4, "in fp8": 7}  # of columns wider than their names


def _line(cells: Mapping[str, object]) -> str:
    return "  ".join(str(cell).rjust(_WIDTHS.get(name, len(name))) for name, cell in cells.items())


def _cells(checked: BatchVerdict) -> dict[str, object]:
    return {
        "batch": checked.number,
        **checked.coverage.cells,
        checked.coverage.ERROR: _report_text(checked, checked.loss_error),
        "gradient": _report_text(checked, checked.gradient_error),
    } | ({} if checked.quantised_error is None else {"in fp8": f"{checked.quantised_error:.1e}"})


def _report_text(checked: BatchVerdict, error: float) -> str:
    return f"{error:.1e}" if checked.bound == BOUND else f"{error:.2f}"


def row(checked: BatchVerdict) -> str:
    """Return the table row of a batch and, if it failed, lines with the reasons."""
    why = list(checked.problems + checked.routing)
    if checked.parameter and not replace(checked, problems=(), routing=()).passed:
        why.insert(0, f"worst gradient: {checked.parameter}")
    return "\n        ".join([_line(_cells(checked)), *why])


def header(checked: BatchVerdict) -> str:
    """Return the header of the table."""
    names = _cells(checked)
    return _line(dict(zip(names, names, strict=True)))


def _worst_of(checked: Sequence[BatchVerdict], bound: float) -> str:
    """Return the largest error of the batches whose bound is ``bound``, as text."""
    batches = [batch for batch in checked if batch.bound == bound]
    worst = max(max(batch.loss_error, batch.gradient_error) for batch in batches)
    of = "" if bound == BOUND else " of the reference model's own"
    return f"{_report_text(batches[0], worst)}{of} (bound {bound:g})"


def verdict(checked: Sequence[BatchVerdict]) -> str:
    """Return the last lines: counts over all batches, and whether the trial is certified."""
    every = [batch.coverage for batch in checked]
    failed = [str(batch.number) for batch in checked if not batch.passed]
    bounds = sorted({batch.bound for batch in checked}, reverse=True)
    worst_error = ", of documents alone ".join(_worst_of(checked, bound) for bound in bounds)
    rounded = [one.quantised_error for one in checked if one.quantised_error is not None]
    besides = (
        f"; of weights in fp8 {max(rounded):.1e} (bound {QUANTISED_BOUND:.1e})" if rounded else ""
    )
    errors = f"worst error {worst_error}{besides}"
    conclusion = (
        f"not certified: {len(failed)} of {len(checked)} batches differ from the reference model: "
        f"{' '.join(failed)}; {errors}"
        if failed
        else f"certified: {len(checked)} batches, {errors}"
    )
    lines = [*every[0].summary(every), *([] if failed else [every[0].HELD]), conclusion]
    return "\n".join(lines)
