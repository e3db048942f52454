"""``python -m megatron_epp certify``: gradients of random plans against the plain model.

Random documents are cut, packed, ordered and recomputed by arbitrary plans, run by the trainer's
own executor, schedule and gradient reduction over gloo processes, and compared in float64 with
Megatron's model on whole documents in one process: the loss, and every parameter's gradient. The
user's model flags are taken with their structure and scaled down.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from megatron_epp.certify.batches import Coverage, Untargeted, draw
from megatron_epp.certify.compare import worst_gradient
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.processes import ChildLost, Children
from megatron_epp.certify.protocol import (
    PLAIN,
    Backend,
    Computed,
    Failed,
    InputRefused,
    Prepared,
    Reference,
    Role,
)
from megatron_epp.certify.routed import differences
from megatron_epp.control.files import scratch_folder

BOUND = 1e-12
MOST_RANKS = 64
# A run without model flags certifies both kinds.
LLAMA = (
    "--hidden-size 1024 --num-attention-heads 16 --group-query-attention "
    "--num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)
GPT = "--hidden-size 1024 --num-attention-heads 16 --position-embedding-type learned_absolute"


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings of a certificate. ``models``: Megatron's flags of each; batches go to them in turn.
    ``lora_rank``: of adapters on the frozen model; 0: none."""

    degrees: Degrees
    models: tuple[tuple[str, ...], ...]
    batches: int = 20
    seed: int = 1234
    overlap: bool = False
    lora_rank: int = 0
    patience_seconds: float = 300.0
    interfere: Path | None = None
    device: str = "cpu"

    def __post_init__(self):
        for name, least in (("batches", 1), ("seed", 0), ("lora_rank", 0), ("patience_seconds", 1)):
            value = getattr(self, name)
            if value < least:
                flag = "--timeout" if name == "patience_seconds" else "--" + name.replace("_", "-")
                raise ValueError(f"{flag} {value}: expected at least {least}")
        for name in ("pp", "tp", "dp", "cp"):
            if getattr(self.degrees, name) < 1:
                raise ValueError(f"--{name} {getattr(self.degrees, name)}: expected at least 1")
        if self.degrees.ranks > MOST_RANKS:
            raise ValueError(
                f"{self.degrees}: {self.degrees.ranks} processes of this host; expected at most "
                f"{MOST_RANKS}, as a small layout certifies what a large one runs"
            )


@dataclass(frozen=True, slots=True)
class Judged:
    """One batch: what it made the executor do, and how far it is from the plain model.

    problems   what went otherwise than planned        routing   how routers differ (routing.py)
    """

    number: int
    coverage: Coverage
    untargeted: Untargeted = field(default_factory=Untargeted)
    messages: int = 0
    loss_error: float = float("inf")
    gradient_error: float = float("inf")
    parameter: str = ""
    collectives: Counter[str] = field(default_factory=Counter)
    problems: tuple[str, ...] = ()
    routing: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        fine = not self.problems and not self.routing
        return fine and self.loss_error <= BOUND and self.gradient_error <= BOUND


def main(backend: Backend, arguments: Sequence[str] | None = None) -> int:
    """0: certified; 1: not. ValueError: input that cannot be used."""
    trial = read(arguments)
    try:
        judged = certify(backend, trial, lambda line: print(line, flush=True))
    except ChildLost as error:
        print(f"not certified: {error}")
        return 1
    print(verdict(judged))
    return 0 if all(batch.passed for batch in judged) else 1


def certify(
    backend: Backend, trial: Trial, show: Callable[[str], None] = lambda line: None
) -> list[Judged]:
    """Run the batches of ``trial`` by ``backend``, telling ``show`` line by line. It stops at the
    first batch in which a rank fails, unless that rank is alone and can go on.

    ValueError: flags that cannot be used. ChildLost: a process that died or stayed silent.
    """
    judged: list[Judged] = []
    with ExitStack() as until_the_end:
        folder = until_the_end.enter_context(scratch_folder("certify"))
        everybody = (PLAIN, *range(trial.degrees.ranks))
        roles = [
            Role(one, trial.degrees.ranks, trial.seed, folder, trial.patience_seconds,
                 trial.interfere, trial.device)
            for one in everybody
        ]  # fmt: skip
        children = until_the_end.enter_context(Children(roles, backend))
        for index, flags in enumerate(trial.models[: trial.batches]):
            prepared = _prepare(children, flags, trial)
            show(f"{trial.degrees}: {prepared.description}")
            if index == 0:
                show(HEADER)
            for number in range(index, trial.batches, len(trial.models)):
                judged.append(_batch(children, number, prepared, trial))
                show(row(judged[-1]))
                if judged[-1].problems and trial.degrees.ranks > 1:
                    return judged
    return judged


def _prepare(children: Children, flags: tuple[str, ...], trial: Trial) -> Prepared:
    prepared = children.ask(
        [PLAIN], "prepare", flags, trial.degrees, trial.overlap, trial.lora_rank
    )[PLAIN]
    require_prepared(prepared)
    ranks = range(trial.degrees.ranks)
    answers = children.ask(
        ranks, "prepare", prepared.args, prepared.frame, prepared.weights, trial.lora_rank
    )
    require_prepared(*answers.values())
    return prepared


def require_prepared(*answers: object) -> None:
    """ValueError: a process refused the input. ChildLost: it failed."""
    for answer in answers:
        if isinstance(answer, InputRefused):
            raise ValueError(answer.reason)
        if isinstance(answer, Failed):
            raise ChildLost(f"{answer.reason}\n{answer.traceback}")


def _batch(children: Children, number: int, prepared: Prepared, trial: Trial) -> Judged:
    everybody = [PLAIN, *range(trial.degrees.ranks)]
    answers = children.ask(everybody, "compute", number)
    drawn = draw(trial.seed, number, prepared.frame)
    coverage = Coverage.of(drawn.step)
    failures = [answer.reason for answer in answers.values() if isinstance(answer, Failed)]
    if failures:
        return Judged(number, coverage, problems=tuple(failures))
    reference: Reference = answers.pop(PLAIN)
    computed: list[Computed] = list(answers.values())
    worst = worst_gradient(
        (part for one in computed for part in one.gradients), reference.gradients
    )
    losses = [
        _loss([one.training_loss for one in computed], drawn.loss_tokens),
        _loss([one.evaluation_loss for one in computed], drawn.loss_tokens),
    ]
    return Judged(
        number,
        coverage,
        drawn.untargeted,
        messages=sum(one.messages for one in computed) // 2,
        loss_error=max(abs(loss - reference.loss) / abs(reference.loss) for loss in losses),
        gradient_error=worst.error,
        parameter=worst.name,
        collectives=sum((one.collectives for one in computed), Counter()),
        problems=tuple(problem for one in computed for problem in one.problems),
        routing=tuple(
            differences([one.routed for one in computed], reference.routed, trial.degrees.dp, BOUND)
        ),
    )


def _loss(parts: Sequence[tuple[float, float]], tokens: int) -> float:
    """Loss per token over all replicas; infinite if they counted other tokens than there are."""
    total, counted = map(sum, zip(*parts, strict=True))
    return total / tokens if counted == tokens else float("inf")


# ------------------------------------------------------------------ what is printed

_COLUMNS = (
    ("batch", 5),
    ("documents", 9),
    ("cut", 3),
    ("chunks", 6),
    ("packed", 6),
    ("split", 5),
    ("hybrid", 6),
    ("window", 6),
    ("I+W", 4),
    ("recomputed", 10),
    ("offloaded", 9),
    ("messages", 8),
    ("loss error", 10),
    ("gradient", 8),
)
HEADER = "  ".join(name.rjust(width) for name, width in _COLUMNS) + "  worst parameter"


def row(judged: Judged) -> str:
    """One line of the table; a batch that failed says why."""
    coverage = judged.coverage
    cells = [
        str(judged.number),
        str(coverage.documents),
        str(coverage.cut),
        str(coverage.chunks),
        str(coverage.packed),
        str(coverage.split),
        str(coverage.hybrid),
        str(coverage.window),
        str(coverage.halved),
        f"{coverage.recomputed}/{coverage.layers}",
        str(coverage.offloaded),
        str(judged.messages),
        f"{judged.loss_error:.1e}",
        f"{judged.gradient_error:.1e}",
    ]
    return table_row(_COLUMNS, cells, judged.parameter, judged.problems + judged.routing)


def table_row(
    columns: Sequence[tuple[str, int]], cells: Sequence[str], parameter: str, why: Sequence[str]
) -> str:
    """``cells`` under ``columns``, the worst parameter behind them, and a line for each ``why``."""
    widths = (width for _, width in columns)
    line = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "\n        ".join([f"{line}  {parameter}".rstrip(), *why])


def verdict(judged: Sequence[Judged]) -> str:
    """The last lines: what was run, and whether it is certified."""
    every = [batch.coverage for batch in judged]
    blank = [batch.untargeted for batch in judged]
    lines = [
        f"chunks: {sum(c.packed for c in every)} packed, {sum(c.split for c in every)} split, "
        f"{sum(c.hybrid for c in every)} hybrid{_empty(every)}{_local(every)}; up to "
        f"{max(c.window for c in every)} in flight on a stage; "
        f"{sum(c.recomputed for c in every)} of {sum(c.layers for c in every)} layers "
        f"recomputed, {sum(c.selective for c in every)} in part, "
        f"{sum(c.offloaded for c in every)} offloaded; {sum(c.halved for c in every)} backwards in "
        "two halves",
        f"without any target: {sum(u.slices for u in blank)} slices, "
        f"{sum(u.chunks for u in blank)} chunks, {sum(u.replicas for u in blank)} replicas",
        issued(batch.collectives for batch in judged),
        conclusion(
            {batch.number: batch.passed for batch in judged},
            max(max(batch.loss_error, batch.gradient_error) for batch in judged),
            "messages as planned, collectives all on the list, nothing kept behind an iteration",
        ),
    ]
    return "\n".join(lines)


def _empty(every: Sequence[Coverage]) -> str:
    count = sum(c.empty for c in every)
    return f", {count} empty in lockstep" if count else ""


def _local(every: Sequence[Coverage]) -> str:
    count = sum(c.local for c in every)
    beside = sum(c.mixed for c in every)
    return f", {count} documents local to a rank, in {beside} chunks beside spread rows" * (
        count > 0
    )


def issued(collectives: Iterable[Counter[str]]) -> str:
    """How often each collective was called, in one line."""
    counts = sorted(sum(collectives, Counter()).items())
    return f"collectives: {', '.join(f'{name} {count}' for name, count in counts) or 'none'}"


def conclusion(passed: Mapping[int, bool], worst: float, held: str) -> str:
    """Whether it is certified: ``passed`` by the number of a batch; ``held``: what else did."""
    failed = [str(number) for number, held_up in passed.items() if not held_up]
    if failed:
        return (
            f"not certified: {len(failed)} of {len(passed)} batches differ from the plain model: "
            f"{' '.join(failed)} (bound {BOUND:g}, worst {worst:.1e})"
        )
    return f"certified: {len(passed)} batches, worst error {worst:.1e} (bound {BOUND:g}); {held}"


# ------------------------------------------------------------------ the command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def read(arguments: Sequence[str] | None = None) -> Trial:
    """The command line; what it does not know is a model flag for Megatron's parser."""
    parser = _Parser(
        prog="megatron_epp certify",
        description=__doc__.split("\n\n")[1],
        epilog="All other flags are Megatron's and describe the model; without them a small Llama "
        "(untied, grouped queries) and a small GPT (tied, learned positions) are certified.",
        allow_abbrev=False,
    )
    parser.add_argument("--pp", type=int, help="pipeline stages (default: the model flags', or 2)")
    parser.add_argument("--tp", type=int, help="tensor-parallel ranks (default: flags', or 1)")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel replicas (default: 1)")
    parser.add_argument("--cp", type=int, help="context-parallel ranks (default: flags', or 1)")
    parser.add_argument("--batches", type=int, default=20, help="global batches (default: 20)")
    parser.add_argument("--seed", type=int, default=1234, help="of documents, plans and weights")
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="reduce gradients while backward runs, sharded over the replicas",
    )
    parser.add_argument(
        "--vocab-parallel",
        action="store_true",
        help="lay the output layer's words over the stages (--epp-vocab-parallel on)",
    )
    parser.add_argument(
        "--lora-rank",
        type=int,
        default=0,
        metavar="R",
        help="freeze the model and train low-rank adapters around its linears (default: 0, none)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="the longest silence of a process before all are ended (default: 300)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: a GPU for each rank, messages over NCCL; the plain model stays on the CPU, and "
        "attention is computed as it is written in books, in float64 (default: cpu)",
    )
    chosen, flags = parser.parse_known_args(arguments)
    own, _ = _degree_flags().parse_known_args(flags)
    degrees = Degrees(
        _first(chosen.pp, own.pipeline_model_parallel_size, 1 if flags else 2),
        _first(chosen.tp, own.tensor_model_parallel_size, 1),
        chosen.dp,
        _first(chosen.cp, own.context_parallel_size, 1),
    )
    models = (tuple(flags),) if flags else _defaults(degrees)
    if chosen.vocab_parallel:
        models = tuple((*model, "--epp-vocab-parallel", "on") for model in models)
    return Trial(
        degrees,
        models,
        chosen.batches,
        chosen.seed,
        chosen.overlap,
        chosen.lora_rank,
        chosen.timeout,
        device=chosen.device,
    )


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _degree_flags() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--pipeline-model-parallel-size", type=int)
    parser.add_argument("--tensor-model-parallel-size", type=int)
    parser.add_argument("--context-parallel-size", type=int)
    return parser


def _defaults(degrees: Degrees) -> tuple[tuple[str, ...], ...]:
    """Two models: with tensor parallelism one of them also splits the sequence."""
    sequence = " --sequence-parallel" if degrees.tp > 1 else ""
    layers = f" --num-layers {2 * degrees.pp}"
    return tuple((LLAMA + layers + sequence).split()), tuple((GPT + layers).split())
