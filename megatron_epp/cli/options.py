"""The commands, and a parser of their options (flags.py) that reports errors in one line."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_epp import __version__
from megatron_epp.flag_fields import did_you_mean
from megatron_epp.ir.errors import quoted

PROGRAM = "megatron_epp"
COMMANDS = {
    "plan": "plan one batch of documents, and print the plan",
    "compare": "compare planners on the same batches",
    "tune": "find the fastest layout for a corpus, and write its launch script",
    "simulate": "simulate a plan: seconds, bubbles with their causes, and memory",
    "draw": "draw a plan as text, SVG, PNG, HTML or Perfetto trace",
    "check": "check that a plan computes everything once and does not deadlock",
    "where": "print the documents of a recorded chunk: sequences, tokens, first words",
    "profile": "measure this host or GPU, and write a cost-model file",
    "certify": "compare gradients of random plans with the reference model",
}
# Commands that import torch and Megatron, and parse their own options.
DOING = {"profile": "trainer.profile_command", "certify": "certify.command"}
_BY_HAND = (
    "set degrees and layers in the framework's configuration; what is printed of Megatron's own "
    "schedule (--planner packing; rows 'stock' of tune) names them"
)
# Options and commands that were removed -> what to do instead.
_AS_TRAINED = "costs are those of training, from the device's rates: leave it out"
REMOVED = {
    **dict.fromkeys(
        ("--b1-divisor", "--head-seconds", "--link-seconds", "--logits-held", "--kv-read"),
        _AS_TRAINED,
    ),
    "--for": _BY_HAND,
    "--grid-svg": "tune prints the grid; --hostfile writes its hosts by node rank",
    "--framework": _BY_HAND,
    "--devices": "give --pp and --cp; tune --gpus N finds the fastest degrees",
    "--noise": "leave it out: simulate plays a plan with the times of the cost model",
    "--dry-run-corpus": "give the degrees of the row to `compare --batches N`",
    "--html": "plan the row with `plan -o x.plan`, and draw it with `draw x.plan -o x.html`",
    "serve": "training starts its planner processes itself; for a plan in a file: plan -o FILE",
    "--partition": "leave it out: --placement auto, the default, chooses layers, too; "
    "--placement even: equally many on every stage",
    "--lockstep": "--ep, --tp and --cp imply it, as in training: ep / (tp x cp) replicas",
    "--whole": "leave it out: only sinkhorn routing, which was removed too, needed uncut documents",
}


class UsageError(ValueError):
    """Error of options that contradict each other, reported like errors of the parser."""


class Parser(argparse.ArgumentParser):
    """Argument parser that raises :class:`UsageError` and suggests near matches."""

    def __init__(self, *arguments, **keywords):
        keywords.setdefault("allow_abbrev", False)
        super().__init__(*arguments, **keywords)

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError with ``message``."""
        raise UsageError(message)

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        """Parse the words of a command; unknown options are reported first."""
        command, *others = args
        known = [name for action in self.flags(command) for name in action]
        for word in others:  # first, because a misspelt option is often also missing
            _refuse_removed(word.split("=")[0].replace("--no-", "--", 1), known)
            if word.startswith("--") and word != "--" and word.split("=")[0] not in known:
                self.error(_unknown(word, known, command))
            if word.startswith("--") and word.endswith("=--"):  # argparse would make it a list
                self.error(f"argument {word[:-3]}: '--' is not a value")
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(_unknown(unknown[0], known, arguments.command))
        return arguments

    def flags(self, command: str | None) -> list[Sequence[str]]:
        """Return the flags of every option of ``command``; for None, those of the main parser."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and command in action.choices:
                return [option.option_strings for option in action.choices[command]._actions]
        return [option.option_strings for option in self._actions]


def parser(chosen: str | None = None) -> Parser:
    """Return the parser of all commands, with the options of the command ``chosen`` only."""
    # Imported late: the tables of models, devices and distributions take as long as the rest.
    from megatron_epp.cli.flags import FLAGS, add_command_flags

    root = Parser(
        prog=PROGRAM,
        description="Elastic Pipeline Parallelism: plan, compare, simulate, draw and check.",
        epilog="Each command explains itself: python -m megatron_epp plan --help",
    )
    root.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    # Not required here: the error below lists the commands and near matches.
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
        add_command_flags(command, FLAGS[name])
    return root


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line and return its command and options.

    Args:
        arguments: words of the command line without the program; default: those of ``sys.argv``.

    Raises:
        UsageError: if the command or an option is missing, unknown or invalid.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        raise UsageError(f"no command; expected one of {', '.join(COMMANDS)}")
    _refuse_removed(words[0], list(COMMANDS))
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        raise UsageError(_unknown(words[0], list(COMMANDS), None))
    if words[0] in DOING:
        return argparse.Namespace(command=words[0], rest=words[1:])
    return parser(words[0]).parse_args(words)


def machine_flags(words: Sequence[str]) -> argparse.Namespace:
    """Parse ``words`` as the machine options of ``simulate``; missing options are None."""
    from megatron_epp.cli.flags import AssumptionFlags, PlansMachineFlags, add_command_flags

    command = Parser(prog=PROGRAM, add_help=False)
    add_command_flags(command, (PlansMachineFlags, AssumptionFlags))
    arguments, unknown = command.parse_known_args(list(words))
    if unknown:
        raise UsageError(f"unknown option {quoted(unknown[0])}")
    return arguments


def _refuse_removed(word: str, known: Sequence[str]) -> None:
    if word in REMOVED and word not in known:
        raise UsageError(f"{word} was removed; {REMOVED[word]}")


def _unknown(word: str, known: Sequence[str], command: str | None) -> str:
    what = "option" if word.startswith("-") else "argument" if command else "command"
    if what == "command":
        otherwise = f"expected one of {', '.join(known)}"
    else:
        otherwise = f"see {PROGRAM} {command or ''} --help".replace("  ", " ")
    hint = did_you_mean(word.split("=")[0], known, otherwise, most=2)
    return f"unknown {what} {quoted(word)}; {hint}"
