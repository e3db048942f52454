"""``python -m megatron_epp certify``: gradients of random plans against the plain model.

One frame for whatever is certified: Megatron's trainer (batches.py, trainer_results.py), and with
--loop training loops of others (loops/). A ``frame`` draws batches, ranks run them by arbitrary
plans, and their answers are compared in float64 with the plain model's.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from megatron_epp.certify.compare import WorstGradient, worst_gradient
from megatron_epp.certify.processes import ChildLost, Children
from megatron_epp.certify.protocol import (
    REFERENCE,
    Backend,
    BatchSource,
    Coverage,
    InputRefusal,
    ModelSetup,
    RankResult,
    Reference,
    RequestFailure,
    Role,
)
from megatron_epp.certify.trial import Trial, read
from megatron_epp.control.files import scratch_folder

BOUND = 1e-12  # relative, in float64
# In fewer digits, of the plain model's own error: two computations of one number in the same
# format are both off by as much, in any direction.
OWN_BOUND = 2.0
# Of gradients of weights whose products are in fp8, in the 2-norm; all else keeps its digits, as
# blocks of what is not summed up over rows lie along a row. A plan says which rows share a block's
# scale: the power of two s with 224 s < amax <= 448 s. In e4m3 a number has its digits in any such
# scale down to 2^-6 s, and is a multiple of 2^-9 s below. So in two ways of cutting it differs by
# 2 * 2^-10 s at most: beside its block's largest by 2 * 2^-10 / 224 (of e5m2 by 5e-10). That share
# of what the largest adds to it, it changes of a line of the gradient, and so does one of the other
# factor. Few numbers are as small, and their errors are random.
QUANTISED_BOUND = 2 * 2 * 2.0**-10 / 224


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """One batch: what it made the executor do, and how far it is from the plain model.

    problems   what went otherwise than planned        routing   how routers differ (routed.py)
    bound      of both errors: BOUND, or of those told in the plain model's own
    quantised_error   of gradients of weights in fp8 (QUANTISED_BOUND), which ``gradient_error``
                      leaves out; None: there are none
    """

    number: int
    coverage: Coverage
    messages: int = 0
    loss_error: float = float("inf")
    gradient_error: float = float("inf")
    parameter: str = ""
    collectives: Counter[str] = field(default_factory=Counter)
    problems: tuple[str, ...] = ()
    routing: tuple[str, ...] = ()
    bound: float = BOUND
    quantised_error: float | None = None

    @property
    def passed(self) -> bool:
        fine = not self.problems and not self.routing
        fine = fine and (self.quantised_error or 0.0) <= QUANTISED_BOUND
        return fine and self.loss_error <= self.bound and self.gradient_error <= self.bound


def main(backend: Backend, arguments: Sequence[str] | None = None) -> int:
    """0: certified; 1: not. ValueError: input that cannot be used."""
    trial = read(arguments)
    try:
        checked = certify(backend, trial, lambda line: print(line, flush=True))
    except ChildLost as error:
        print(f"not certified: {error}")
        return 1
    print(verdict(checked))
    return 0 if all(batch.passed for batch in checked) else 1


def certify(
    backend: Backend, trial: Trial, show: Callable[[str], None] = lambda line: None
) -> list[BatchVerdict]:
    """Run the batches of ``trial`` by ``backend``, telling ``show`` line by line. It stops at the
    first batch in which a rank fails, unless that rank is alone and can go on.

    ValueError: flags that cannot be used. ChildLost: a process that died or stayed silent.
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
    """ValueError: a process refused the input. ChildLost: it failed."""
    results: list[T] = []
    for answer in answers.values():
        if isinstance(answer, InputRefusal):
            raise ValueError(answer.reason)
        if isinstance(answer, RequestFailure):
            raise ChildLost(f"{answer.reason}\n{answer.traceback}")
        results.append(answer)
    return results


def _batch(children: Children, number: int, frame: BatchSource, trial: Trial) -> BatchVerdict:
    asked = trial.drawn_number(number)
    answers = children.ask(children.roles, "compute", asked)
    drawn = frame.draw(trial.seed, asked)
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
        messages=sum(one.messages for one in computed) // 2,
        loss_error=reference.loss_error(computed),
        gradient_error=worst.error,
        parameter=worst.name,
        collectives=sum((one.collectives for one in computed), Counter()),
        problems=tuple(problem for one in computed for problem in one.problems),
        # In fewer digits, what routers log says nothing that their gradients do not.
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
    """The worst of the gradients whose key ``counts``."""
    parts = (part for one in computed for part in one.gradients if counts(part.key))
    expected = {key: tensor for key, tensor in reference.gradients.items() if counts(key)}
    return worst_gradient(parts, expected, reference.own, rounded)


# ------------------------------------------------------------------ what is printed

_WIDTHS = {"loss": 8, "I+W": 4, "in fp8": 7}  # of columns wider than their names


def _line(cells: Mapping[str, object], parameter: str) -> str:
    padded = (str(cell).rjust(_WIDTHS.get(name, len(name))) for name, cell in cells.items())
    return f"{'  '.join(padded)}  {parameter}".rstrip()


def _cells(checked: BatchVerdict) -> dict[str, object]:
    return {
        "batch": checked.number,
        **checked.coverage.cells,
        "messages": checked.messages,
        checked.coverage.ERROR: _report_text(checked, checked.loss_error),
        "gradient": _report_text(checked, checked.gradient_error),
    } | ({} if checked.quantised_error is None else {"in fp8": f"{checked.quantised_error:.1e}"})


def _report_text(checked: BatchVerdict, error: float) -> str:
    return f"{error:.1e}" if checked.bound == BOUND else f"{error:.2f}"


def row(checked: BatchVerdict) -> str:
    """One line of the table; a batch that failed says why."""
    why = checked.problems + checked.routing
    return "\n        ".join([_line(_cells(checked), checked.parameter), *why])


def header(checked: BatchVerdict) -> str:
    """Names of the columns of such batches."""
    names = _cells(checked)
    return _line(dict(zip(names, names, strict=True)), "worst parameter")


def _worst_of(checked: Sequence[BatchVerdict], bound: float) -> str:
    """The worst error of batches with that bound."""
    batches = [batch for batch in checked if batch.bound == bound]
    worst = max(max(batch.loss_error, batch.gradient_error) for batch in batches)
    of = "" if bound == BOUND else " of the plain model's own"
    return f"{_report_text(batches[0], worst)}{of} (bound {bound:g})"


def verdict(checked: Sequence[BatchVerdict]) -> str:
    """The last lines: what was run, and whether it is certified."""
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
        f"not certified: {len(failed)} of {len(checked)} batches differ from the plain model: "
        f"{' '.join(failed)}; {errors}"
        if failed
        else f"certified: {len(checked)} batches, {errors}; {every[0].HELD}"
    )
    counts = sorted(sum((batch.collectives for batch in checked), Counter()).items())
    issued = f"collectives: {', '.join(f'{name} {count}' for name, count in counts) or 'none'}"
    return "\n".join([*every[0].summary(every), issued, conclusion])
