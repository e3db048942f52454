"""Every option of every command, with its unit and its default."""

import argparse
import difflib
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

PROGRAM = "megatron_epp"
COMMANDS = {
    "plan": "plan one batch of documents, and print the plan",
    "compare": "every planner on the same batches, in a table",
    "tune": "which layout of a job is fastest on a corpus; writes its launch script",
    "simulate": "play a plan on a machine: seconds, bubbles and why they are there, bytes",
    "draw": "a picture of a plan: text, SVG, PNG, HTML, Perfetto trace, torch's CSV",
    "check": "whether a plan computes everything once and never deadlocks",
    "serve": "the planner process of a training job: requests on stdin, plans on stdout",
    "profile": "measure this host or GPU and write a cost-model file",
    "certify": "gradients of random plans against the plain model",
}
# They import torch and Megatron, and read their own options.
DOING = {"profile": "calibrate.command", "certify": "certify.command"}


AUTO = 0  # in the place of a degree that the planner is to choose


# A batch of more documents is a mistake: planning it would take minutes.
MOST_DOCUMENTS = 32_768
# Fields that only an analytic cost model has.
ASSUMPTIONS = ("b1_divisor", "head_seconds", "link_seconds", "logits_held", "kv_read", "topology")


class UsageError(ValueError):
    """Options that do not fit together; the parser prints it as its own."""


class Parser(argparse.ArgumentParser):
    """One line on stderr and exit status 2, with the near matches of what it does not know."""

    def __init__(self, *arguments, **keywords):
        keywords.setdefault("allow_abbrev", False)
        super().__init__(*arguments, **keywords)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        command, *others = args
        known = [name for action in self.flags(command) for name in action]
        for word in others:  # first: a misspelt option is often missing, too
            if word.startswith("--") and word != "--" and word.split("=")[0] not in known:
                self.error(_unknown(word, known, command))
            if word.startswith("--") and word.endswith("=--"):  # argparse would make it a list
                self.error(f"argument {word[:-3]}: '--' is no value")
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(_unknown(unknown[0], known, found.command))
        return found

    def flags(self, command: str | None) -> list[Sequence[str]]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and command in action.choices:
                return [option.option_strings for option in action.choices[command]._actions]
        return [option.option_strings for option in self._actions]


def parser(chosen: str | None = None) -> Parser:
    """All commands by name; the options of the ``chosen`` one."""
    root = Parser(
        prog=PROGRAM,
        description="Elastic Pipeline Parallelism: plan, compare, simulate, draw and check.",
        epilog="Each command explains itself: python -m megatron_epp plan --help",
    )
    root.add_argument("--version", action="version", version=f"{PROGRAM} {_version()}")
    # Not required here: the refusal below names the commands and the near ones.
    commands = root.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        if name != chosen:
            commands.add_parser(name, help=text, add_help=False)
            continue
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _OPTIONS[name](command)
    return root


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        raise UsageError(f"no command; expected one of {', '.join(COMMANDS)}")
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        raise UsageError(_unknown(words[0], list(COMMANDS), None))
    if words[0] in DOING:
        return argparse.Namespace(command=words[0], rest=words[1:])
    return parser(words[0]).parse_args(words)


def machine_flags(words: Sequence[str]) -> argparse.Namespace:
    """The options of ``simulate`` that name a machine; all are None that ``words`` leave out."""
    command = Parser(prog=PROGRAM, add_help=False)
    _machine(command, pp=False, required=False)
    found, unknown = command.parse_known_args(list(words))
    if unknown:
        raise UsageError(f"unknown option {unknown[0]!r}")
    return found


def _unknown(word: str, known: Sequence[str], command: str | None) -> str:
    what = "option" if word.startswith("-") else "argument" if command else "command"
    near = difflib.get_close_matches(word.split("=")[0], known, n=2)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif what == "command":
        hint = f"expected one of {', '.join(known)}"
    else:
        hint = f"see {PROGRAM} {command or ''} --help".replace("  ", " ")
    return f"unknown {what} {word!r}; {hint}"


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("megatron-epp")
    except PackageNotFoundError:
        return "from a checkout"


# ------------------------------------------------------------------ types


def whole_number(least: int, most: int = 10**15 - 1) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text) if len(text) <= 15 else most + 1
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            limits = f"of at least {least}" if value < least else f"of at most {most}"
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number {limits}")
        return value

    return read


def whole_or_auto(text: str) -> int:
    if text == "auto":
        return AUTO
    try:
        return whole_number(1)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or auto") from None


def positive(unit: str, most: float = 1e6) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0, in {unit}")
        if not 1 / most <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected a number from {1 / most:g} to {most:g}, in {unit}"
            )
        return value

    return read


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share from 0 to below 1, as 0.05")
    return value


def one_of(*names: str) -> Callable[[str], str]:
    """Instead of argparse's choices, whose refusal shows no near match."""

    def read(text: str) -> str:
        if text not in names:
            near = difflib.get_close_matches(text, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise argparse.ArgumentTypeError(f"{text!r}: {hint}expected {', '.join(names)}")
        return text

    return read


# ------------------------------------------------------------------ options by theme


def _batch(command: argparse.ArgumentParser) -> None:
    # Here, because the planners load a compiler and a solver, which half of the commands never use.
    from megatron_epp.corpus.lengths import DEFAULT_SEED, distribution_names
    from megatron_epp.corpus.overlong import OVERLONG

    group = command.add_argument_group("documents")
    group.add_argument(
        "--lengths",
        required=True,
        metavar="FILE|NAME",
        help="a text file with the inputs of one document on each line (.gz too), a Megatron "
        f".idx, or a shipped distribution: {', '.join(distribution_names())}",
    )
    group.add_argument(
        "--context",
        type=whole_number(1),
        default=0,
        metavar="TOKENS",
        help="the most inputs of a document (default: no limit)",
    )
    group.add_argument(
        "--overlong",
        type=one_of(*OVERLONG),
        default="truncate",
        metavar="HOW",
        help="documents longer than the context: truncate (default), drop, or split",
    )
    group.add_argument(
        "--global-batch-size",
        type=whole_number(1, MOST_DOCUMENTS),
        metavar="N",
        help="documents in a batch, over all replicas (default: 512; all of a text file of at "
        "most 16384 lengths, in the order of the file, where one batch is asked for)",
    )
    group.add_argument(
        "--seed",
        type=whole_number(0),
        default=DEFAULT_SEED,
        metavar="N",
        help=f"of the shuffle, as in training (default: {DEFAULT_SEED}, Megatron's)",
    )


def _machine(
    command: argparse.ArgumentParser,
    *,
    pp: bool,
    required: bool,
    checked: bool = False,
    partition: bool = False,
) -> None:
    from megatron_epp.cost.devices import DEVICES
    from megatron_epp.cost.models import MODELS

    group = command.add_argument_group("model and machine")
    if not pp:
        group.description = (
            "What `plan -o` wrote in the plan's comment stands where no option does."
            if not checked
            else "To hold the plan against the memory of its stages, too."
        )
    note = "" if required or checked else " (without: every op takes a round number of units)"
    group.add_argument(
        "--model",
        metavar="NAME|FILE",
        help=f"{', '.join(MODELS)}, or a JSON file{note}",
    )
    group.add_argument(
        "--device",
        metavar="NAME|FILE",
        help=f"{', '.join(DEVICES)}, or a JSON file",
    )
    group.add_argument(
        "--cost-model",
        metavar="FILE",
        help="a measured profile (from the profile command) instead of the analytic one",
    )
    _degrees(group, pp)
    _parts_of_stages(group, pp, partition)
    group.add_argument(
        "--memory-budget-gib",
        type=positive("GiB"),
        nargs="+",
        metavar="X",
        help="of one device, model states included (on a CPU without them); one number, or one "
        "for every stage (default: the device's own)",
    )
    group.add_argument(
        "--zero",
        type=one_of("1", "3"),
        metavar="1|3",
        help="1: weights stay on every device; 3: states are spread and layers gathered for every "
        "chunk (default: 3 for gpt-*, else 1)",
    )
    _assumptions(command)


def _degrees(group: Any, pp: bool) -> None:
    if pp:
        group.add_argument("--pp", type=whole_or_auto, metavar="N", help="pipeline stages, or auto")
        group.add_argument(
            "--cp",
            type=whole_or_auto,
            default=1,
            metavar="N",
            help="context-parallel (Ulysses) degree, or auto (default: 1)",
        )
        group.add_argument(
            "--devices",
            type=whole_number(1),
            metavar="N",
            help="all devices of the job; for --pp auto and --cp auto",
        )
    else:
        group.add_argument(
            "--cp",
            type=whole_number(1),
            metavar="N",
            help="context-parallel (Ulysses) degree (default: 1)",
        )
    group.add_argument(
        "--tp",
        type=whole_number(1),
        default=1 if pp else None,
        metavar="N",
        help="tensor-parallel degree (default: 1)",
    )
    group.add_argument(
        "--dp",
        type=whole_number(1),
        default=None if not pp else 1,
        metavar="N",
        help="data-parallel replicas (default: 1)" if pp else "replicas (default: the plan's)",
    )
    group.add_argument(
        "--ep",
        type=whole_number(1),
        metavar="N",
        help="devices that share a layer's experts: a divisor of tp x cp (default: as many as "
        "divide the experts), or a multiple, over replicas that then run in lockstep",
    )


def _parts_of_stages(group: Any, pp: bool, partition: bool) -> None:
    """Parts of the model that each stage has."""
    group.add_argument(
        "--layers",
        type=whole_number(0),
        nargs="+",
        metavar="N",
        help="transformer layers of every stage (default: even"
        + (")" if pp else "; a plan names its own)"),
    )
    if partition:
        group.add_argument(
            "--partition",
            type=one_of("even", "auto"),
            default="even",
            metavar="HOW",
            help="layers of the stages where --layers does not name them: even (default), or auto: "
            "by time on the corpus's expected lengths",
        )
    group.add_argument(
        "--vocab-parallel",
        type=one_of("auto", "on", "off"),
        default="off" if pp else None,
        metavar="HOW",
        help="cut the output layer over the stages: on, off (default), or auto: on where plans for "
        "the corpus's first batches take at least 1%% less time"
        if pp
        else "whether the plan must have the output layer cut over the stages, on or off (default: "
        "auto, as it has)",
    )
    group.add_argument(
        "--layer-kinds",
        metavar="KINDS",
        help="the kinds of all layers, first to last, where --cost-model knows several and no "
        "--model says which is which, as in '3*dense 58*experts'",
    )


def _assumptions(command: argparse.ArgumentParser) -> None:
    from megatron_epp.cost.network.topology import FLAT, TOPOLOGIES

    assumed = command.add_argument_group("assumptions of the analytic cost model")
    assumed.add_argument(
        "--b1-divisor",
        type=positive("times"),
        metavar="X",
        help="of the papers' constant per chunk (default: 5)",
    )
    for flag, text in (
        ("head-seconds", "whether the output layer costs time"),
        ("link-seconds", "whether messages between stages cost time"),
        (
            "logits-held",
            "whether logits live from forward to backward (default: not; the output layer runs its "
            "backward in forward, as in training)",
        ),
        (
            "kv-read",
            "whether a slice pays for reading its context's K and V (default: yes; never with the "
            "papers' constants)",
        ),
    ):
        assumed.add_argument(
            f"--{flag}", action=argparse.BooleanOptionalAction, default=None, help=text
        )
    assumed.add_argument(
        "--topology",
        metavar="NAME|FILE",
        help=f"how devices are joined: {', '.join(TOPOLOGIES)}, a JSON file, or {FLAT}: rates by a "
        "group's size alone, wherever it lies (default: nodes, of the device's own size)",
    )


def _planner(command: argparse.ArgumentParser, *, names: str | None) -> None:
    from megatron_epp.planner import LEVERS, PLANNERS, Options

    group = command.add_argument_group("planner")
    if names == "one":
        group.add_argument(
            "--planner",
            default="epp",
            metavar="NAME",
            help="epp (default), infinipipe, packing, ...",
        )
    elif names == "many":
        group.add_argument(
            "--planner",
            nargs="+",
            metavar="NAME",
            help=f"which to compare (default: all of {', '.join(PLANNERS)})",
        )
    group.add_argument(
        "--levers",
        default="default",
        metavar="LIST",
        help="what the epp planner may use: default (what training does by default), all (also "
        "what can only be simulated), none, or names joined by commas; default,-NAME takes one "
        "away",
    )
    group.add_argument(
        "--host-memory-gib",
        type=positive("GiB"),
        metavar="X",
        help="of the host's memory, for what one device offloads (lever offload; default: any)",
    )
    group.add_argument(
        "--effort",
        type=whole_number(0, 1_000_000),
        metavar="N",
        help="how much work the search may do, in proportion; 0 takes the first good plan "
        f"(default: {Options().effort})",
    )
    group.add_argument(
        "--multiple",
        type=whole_number(1, 1 << 20),
        default=1,
        metavar="TOKENS",
        help="chunks are padded to a multiple of this (default: 1)",
    )
    group.add_argument(
        "--lockstep",
        type=whole_number(1),
        metavar="N",
        help="replicas that run op by op together, a divisor of --dp (default: those that share a "
        "layer's experts, ep / (tp x cp))",
    )
    width = max(map(len, LEVERS))
    lines = (
        textwrap.fill(f"  {name:<{width}}  {text}", 79, subsequent_indent=" " * (width + 4))
        for name, text in LEVERS.items()
    )
    command.epilog = "\n".join(["levers of the epp planner:", *lines])


def _plan_file(command: argparse.ArgumentParser) -> None:
    command.add_argument("plan", metavar="PLAN", help="a plan or step file; - for stdin")


def _replica(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--replica",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="which replica of a step of several (default: 0)",
    )


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON instead of text")


# ------------------------------------------------------------------ commands


def _plan(command: Parser) -> None:
    _batch(command)
    command.add_argument(
        "--batch",
        type=whole_number(0),
        default=0,
        metavar="I",
        help="which batch, from 0 (default: 0)",
    )
    _machine(command, pp=True, required=True, partition=True)
    _planner(command, names="one")
    command.add_argument(
        "--forward-only", action="store_true", help="a plan of forwards alone, for evaluation"
    )
    command.add_argument(
        "-o", "--output", metavar="PLAN", help="write the plan here instead of to stdout"
    )
    _json(command)


def _compare(command: Parser) -> None:
    _batch(command)
    command.add_argument(
        "--batches",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="how many batches (default: 1)",
    )
    command.add_argument(
        "--first-batch",
        type=whole_number(0),
        default=0,
        metavar="I",
        help="number of the first one (default: 0)",
    )
    _machine(command, pp=True, required=True, partition=True)
    _planner(command, names="many")
    _json(command)


def _simulate(command: Parser) -> None:
    _plan_file(command)
    _machine(command, pp=False, required=True)
    command.add_argument(
        "--noise",
        type=fraction,
        default=0.0,
        metavar="SHARE",
        help="standard deviation of every duration, as a share of it (default: 0)",
    )
    command.add_argument(
        "--seed", type=whole_number(0), default=0, metavar="N", help="of the noise"
    )
    command.add_argument(
        "-o", "--output", metavar="RECORDS", help="write the timed records here, for draw"
    )
    _replica(command)
    _json(command)


def _draw(command: Parser) -> None:
    _plan_file(command)
    command.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="x.svg, x.png, x.html, x.txt, x.json (Chrome trace, for ui.perfetto.dev) or x.csv "
        "(torch.distributed.pipelining); without it, text on stdout",
    )
    command.add_argument(
        "--records",
        metavar="FILE",
        help="timed records of a run of this plan; with a model, drawn below the prediction",
    )
    command.add_argument("--title", metavar="TEXT", help="heading (default: the file's name)")
    command.add_argument(
        "--width",
        type=whole_number(40, 100_000),
        metavar="N",
        help="columns of text (default: the terminal's), or pixels of a picture (default: at most "
        "2400, for a screen; very short ops show their numbers in a wider one, or in x.html)",
    )
    _replica(command)
    _machine(command, pp=False, required=False)


def _check(command: Parser) -> None:
    _plan_file(command)
    _machine(command, pp=False, required=False, checked=True)
    _json(command)


def _serve(command: Parser) -> None:
    _machine(command, pp=True, required=True)
    _planner(command, names=None)
    command.add_argument(
        "--context", type=whole_number(1), default=0, metavar="TOKENS", help="what packing packs to"
    )


def _tune(command: Parser) -> None:
    from megatron_epp.cost.devices import DEVICES
    from megatron_epp.cost.models import MODELS
    from megatron_epp.planner.options import Options

    _batch(command)
    command.add_argument(
        "--batches",
        type=whole_number(1, 1000),
        default=2,
        metavar="N",
        help="batches that the best layouts are planned on (default: 2)",
    )
    group = command.add_argument_group("model and machine")
    for name, known in (("model", MODELS), ("device", DEVICES)):
        group.add_argument(
            f"--{name}",
            required=True,
            metavar="NAME|FILE",
            help=f"{', '.join(known)}, or a JSON file",
        )
    group.add_argument(
        "--nodes",
        type=whole_number(1, 1_000_000),
        required=True,
        metavar="N",
        help="nodes of the job",
    )
    group.add_argument(
        "--ep",
        type=whole_number(1),
        metavar="N",
        help="devices that share a layer's experts, in every layout that can: more than its tp x "
        "cp are of several replicas, which run in lockstep (default: as many of the tp x cp as "
        "divide the experts)",
    )
    group.add_argument(
        "--devices-per-node",
        type=whole_number(1, 1_000_000),
        metavar="N",
        help="devices of a node (default: the device's own, 8)",
    )
    group.add_argument(
        "--memory-budget-gib",
        type=positive("GiB"),
        nargs=1,
        metavar="X",
        help="of one device, model states included (default: the device's own)",
    )
    for name, text in (
        ("tp", "tensor-parallel degree"),
        ("cp", "context-parallel (Ulysses) degree"),
        ("pp", "pipeline stages"),
        ("dp", "data-parallel replicas"),
    ):
        group.add_argument(
            f"--{name}",
            type=whole_number(1),
            metavar="N",
            help=f"only with this {text} (default: any)",
        )
    group.add_argument(
        "--partition",
        type=one_of("even", "auto"),
        default="auto",
        metavar="HOW",
        help="layers of the stages: auto: by time where that is faster (default), or even",
    )
    group.add_argument(
        "--vocab-parallel",
        type=one_of("auto", "on", "off"),
        default="off",
        metavar="HOW",
        help="cut the output layer over the stages: on, off (default), or auto: where that takes "
        "at least 1%% less time",
    )
    _assumptions(command)
    group = command.add_argument_group("planner")
    group.add_argument(
        "--levers",
        default="default",
        metavar="LIST",
        help="what the epp planner may use, as for plan; offloading is tried where memory is tight",
    )
    group.add_argument(
        "--effort",
        type=whole_number(0, 1_000_000),
        metavar="N",
        help=f"how much work the search for the best layouts' plans may do (default: "
        f"{Options().effort})",
    )
    group.add_argument(
        "--top",
        type=whole_number(1, 1000),
        default=10,
        metavar="N",
        help="rows to print (default: 10)",
    )
    command.add_argument("--script", metavar="FILE", help="write the first choice's launch script")
    command.add_argument(
        "--dry-run-corpus",
        type=whole_number(1, 100_000),
        metavar="N",
        help="play N iterations of the corpus with the first choice, and print their spread",
    )
    _json(command)


_OPTIONS: dict[str, Callable[[Parser], None]] = {
    "plan": _plan,
    "compare": _compare,
    "tune": _tune,
    "simulate": _simulate,
    "draw": _draw,
    "check": _check,
    "serve": _serve,
}
