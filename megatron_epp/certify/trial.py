"""Settings of a certificate, each with a flag; all other flags describe the model.

To add a degree of parallelism, add a field to :class:`Degrees` and :class:`DegreeFlags`, and set it
in :func:`read_as`. The function :func:`implied_flags` returns the flags of Megatron that follow
from a setting.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import ClassVar, NoReturn

from megatron_epp.certify.degrees import Degrees
from megatron_epp.cost.build import even_layers
from megatron_epp.cost.catalogue.megatron_flags import model_flags
from megatron_epp.cost.catalogue.models import model as known_model
from megatron_epp.cost.catalogue.models import model_config
from megatron_epp.flag_fields import JoinedArguments, add_flags, flag, flag_of
from megatron_epp.ir.placement import A_PLACEMENT, read_placement
from megatron_epp.planner.choose.partition import layout_flags
from megatron_epp.safe_files import bounded_text

MOST_RANKS = 64
FLOAT64, BF16 = DTYPES = ("float64", "bf16")
# Flags of the project's own certificates (tests/certify), which this command had.
_MOVED = {"--loop", "--loop-model", "--trees", "--planner", "--documents"}
# Without model flags both kinds are certified.
LLAMA = (
    "--hidden-size 1024 --num-attention-heads 16 --group-query-attention "
    "--num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 352 --moe-token-dispatcher-type "
    "alltoall --moe-router-load-balancing-type none"
)
GPT = (
    "--hidden-size 1024 --num-attention-heads 16 --position-embedding-type learned_absolute "
    "--attention-dropout 0"
)


@dataclass(frozen=True, slots=True)
class DegreeFlags:
    """Flags of the degrees of parallelism; a missing degree is taken from the model flags."""

    pp: int | None = flag(None, "Number of pipeline ranks (default: from the flags, or 2).")
    tp: int | None = flag(None, "Tensor-parallel degree (default: from the flags, or 1).")
    dp: int = flag(1, "Number of data-parallel replicas (default: 1).")
    cp: int | None = flag(None, "Context-parallel degree (default: from the flags, or 1).")
    ep: int | None = flag(
        None,
        "Expert-parallel degree; above tp x cp, replicas share experts (default: from the flags). "
        "Without flags of a model, a small MoE model is certified.",
    )
    vocab_parallel: bool = flag(
        False, "Shard the LM head over the stages, as --epp-vocab-parallel on does."
    )
    placement: str | None = flag(
        None,
        "Several stages on a rank: interleaved N, v, or a file, as for --epp-placement (default: "
        "one stage).",
        metavar="PLACEMENT",
        nargs="+",
        action=JoinedArguments,
    )


@dataclass(frozen=True, slots=True)
class DescribedModelFlags:
    """Flags that name a model or its config.json, from which Megatron's model flags follow."""

    TITLE: ClassVar = "model"

    model: str | None = flag(
        None,
        "Certify with the flags that `tune --model` prints for this model: a name, a config.json "
        "of transformers, its folder, or a cached org/name. Flags after it are added.",
        metavar="NAME|FILE",
    )
    like: str | None = flag(
        None, "Read the config.json as if its model_type were this one.", metavar="MODEL_TYPE"
    )

    @staticmethod
    def flags(name: str, like: str | None, pp: int) -> list[str]:
        """Return Megatron's flags for ``name`` on ``pp`` stages; ``like`` replaces its model_type.

        Raises:
            ValueError: if the model is unknown or invalid, flags cannot express it, or it has fewer
                than ``pp`` layers.
        """
        described = known_model(name, like)
        layers = even_layers(described.layers, pp)
        of_model = model_flags(described, model_config(name, like), stages=layers)
        if of_model.unsaid:
            raise ValueError(
                f"--model {name}: Megatron's flags cannot say: {'; '.join(of_model.unsaid)}; give "
                "the flags of the model that is trained"
            )
        of_stages = [] if of_model.hybrid else layout_flags(layers)
        return [*(word for group in of_model.groups for word in group), *of_stages]


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings of a certificate.

    Attributes:
        degrees: degrees of parallelism.
        models: Megatron's flags of each model; batches alternate between models.
        batches: number of batches.
        seed: seed of documents, plans and weights.
        overlap: whether gradients are reduced during backward.
        lora_rank: rank of adapters; 0 for none.
        timeout: seconds to wait for an answer of a process.
        interfere: Python file with which tests break the executor (protocol.py).
        device: cpu or cuda.
        dtype: float64 or bf16.

    Raises:
        ValueError: if a number is too small, there are too many ranks, or adapters are not in
            float64.
    """

    OMIT: ClassVar = ("degrees", "models", "interfere")

    degrees: Degrees
    models: tuple[tuple[str, ...], ...]
    batches: int = flag(20, "Number of global batches (default: 20).")
    seed: int = flag(1234, "Seed of documents, plans and weights.")
    overlap: bool = flag(
        False, "Overlap gradient reduction with backward, with the distributed optimizer."
    )
    lora_rank: int = flag(
        0,
        "Freeze the model and train low-rank adapters of this rank around its linears (default: "
        "0, no adapters).",
        metavar="R",
    )
    timeout: float = flag(
        300.0,
        "Time without progress of a process after which all processes are ended (default: 300).",
        metavar="SECONDS",
    )
    interfere: Path | None = None
    device: str = flag(
        "cpu",
        "cuda: one GPU per rank, with messages over NCCL. The reference model stays on the CPU, "
        "and attention in float64 runs without fused kernels (default: cpu).",
        choices=("cpu", "cuda"),
    )
    dtype: str = flag(
        FLOAT64,
        "bf16: use the format and the kernels of training. The bound is then twice the bf16 error "
        "of the reference model (default: float64).",
        choices=DTYPES,
    )

    def __post_init__(self) -> None:
        degrees, least = self.degrees, {"batches": 1, "seed": 0, "lora_rank": 0, "timeout": 1}
        values = {name: getattr(self, name) for name in least}
        values |= {name: getattr(degrees, name) for name in ("pp", "tp", "dp", "cp")}
        for name, value in values.items():
            if value < least.get(name, 1):
                raise ValueError(f"{flag_of(name)} {value}: expected at least {least.get(name, 1)}")
        if degrees.ranks > MOST_RANKS:
            raise ValueError(
                f"{degrees}: {degrees.ranks} processes of this host; expected at most "
                f"{MOST_RANKS}, as a small layout certifies what a large one runs"
            )
        if self.lora_rank and self.dtype != FLOAT64:
            raise ValueError(
                f"--lora-rank {self.lora_rank}: adapters are certified in float64; leave out "
                f"--dtype {self.dtype}"
            )

    @property
    def title(self) -> str:
        """Degrees and dtype as text, for the table's title."""
        return str(self.degrees) + (f", {self.dtype}" if self.dtype != FLOAT64 else "")

    @property
    def turns(self) -> int:
        """Number of jobs that run the batches in turn: one per model."""
        return len(self.models)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def certify_parser(settings: type[Trial] = Trial) -> argparse.ArgumentParser:
    """Return the parser of all flags of the command except the model flags.

    The fields of ``settings`` are flags, except for those in ``settings.OMIT``.
    """
    parser = _Parser(
        prog="megatron_epp certify",
        description="Random documents are cut, packed, ordered and recomputed by arbitrary plans, "
        "run by the trainer's own executor, schedule and gradient reduction over gloo processes, "
        "and compared, in float64 if not told otherwise, with Megatron's model on whole documents "
        "in one process: the loss, and every parameter's gradient. The user's model flags are "
        "taken with their structure and scaled down; --model takes them from a config.json.",
        epilog="All other flags are Megatron's and describe the model; without them a small Llama "
        "(untied, grouped queries) and a small GPT (tied, learned positions) are certified.",
        allow_abbrev=False,
    )
    add_flags(parser, DescribedModelFlags)
    add_flags(parser, DegreeFlags)
    add_flags(parser, settings)
    return parser


def read(arguments: Sequence[str] | None = None) -> Trial:
    """Parse the command line; unknown flags are model flags for Megatron's parser.

    Args:
        arguments: the command line after ``certify``; None takes ``sys.argv``.

    Raises:
        ValueError: if flags are invalid or contradict each other.
    """
    return read_as(Trial, arguments)


def read_as[T: Trial](settings: type[T], arguments: Sequence[str] | None) -> T:
    """Parse the command line into ``settings``, whose fields are flags; see :func:`read`."""
    chosen, flags = certify_parser(settings).parse_known_args(arguments)
    for word in flags:
        if (name := word.split("=")[0]) in _MOVED:
            raise ValueError(
                f"certify: {name} is not a flag of this command any more; run python -m "
                "tests.certify with the same flags in a checkout"
            )
    if chosen.model is not None:
        flags = [*DescribedModelFlags.flags(chosen.model, chosen.like, chosen.pp or 1), *flags]
    elif chosen.like is not None:
        raise ValueError(f"--like {chosen.like}: how to read a --model, which is missing")
    own, _ = _degree_flags().parse_known_args(flags)
    degrees = Degrees(
        _first(chosen.pp, own.pipeline_model_parallel_size, 1 if flags else 2),
        _first(chosen.tp, own.tensor_model_parallel_size, 1),
        chosen.dp,
        _first(chosen.cp, own.context_parallel_size, 1),
    )
    stages = _stages(chosen.placement, degrees.pp)
    models = (tuple(flags),) if flags else _defaults(degrees, stages, chosen.ep is not None)
    besides = implied_flags(chosen)
    values = {one.name: getattr(chosen, one.name) for one in fields(settings)
              if one.name not in settings.OMIT}  # fmt: skip
    return settings(degrees, tuple((*model, *besides) for model in models), **values)


def implied_flags(chosen: argparse.Namespace) -> tuple[str, ...]:
    """Return the flags of Megatron that follow from the command's flags.

    Raises:
        ValueError: if a flag is invalid, or has no meaning for a certificate.
    """
    words: tuple[str, ...] = ()
    if chosen.vocab_parallel:
        words += "--epp-vocab-parallel", "on"
    if chosen.placement in ("auto", "flags"):
        raise ValueError(
            f"--placement {chosen.placement}: a certificate is of one placement; expected "
            "interleaved N, v, or a file"
        )
    if chosen.placement is not None:
        words += "--epp-placement", chosen.placement
    if chosen.ep is None:
        return words
    if chosen.ep < 1:
        raise ValueError(f"--ep {chosen.ep}: expected at least 1")
    experts = "--expert-model-parallel-size", str(chosen.ep), "--expert-tensor-parallel-size", "1"
    return (*words, *experts)


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _degree_flags() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--pipeline-model-parallel-size", type=int)
    parser.add_argument("--tensor-model-parallel-size", type=int)
    parser.add_argument("--context-parallel-size", type=int)
    return parser


def _stages(placement: str | None, ranks: int) -> int:
    """Return the number of stages of ``ranks`` pipeline ranks.

    If ``placement`` is invalid, return ``ranks``: the error is reported when the model is built.
    """
    if placement is None:
        return ranks
    try:
        return read_placement(placement, ranks, partial(bounded_text, expected=A_PLACEMENT)).stages
    except (ValueError, OSError):
        return ranks


def _defaults(degrees: Degrees, stages: int, experts: bool) -> tuple[tuple[str, ...], ...]:
    """Return the flags of two models, a Llama and a GPT; with ``experts``, only of a MoE Llama.

    With tensor parallelism, the Llama has sequence parallelism.
    """
    sequence = " --sequence-parallel" if degrees.tp > 1 else ""
    layers = f" --num-layers {2 * stages}"
    llama = (LLAMA + layers + sequence).split()
    if experts:
        return ((*llama, *EXPERTS.split()),)
    return tuple(llama), tuple((GPT + layers).split())
