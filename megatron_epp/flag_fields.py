"""Command-line flags as fields of a dataclass, each with its type, default, unit and help."""

import argparse
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, field, fields
from types import NoneType
from typing import Any, get_args


def flag(
    default: Any,
    help_: str | Callable[[], str],
    word: tuple[str, Callable[[str], Any]] | None = None,
    **how: Any,
) -> Any:
    """Return a dataclass field for a flag; the flag of field ``some_name`` is ``--some-name``.

    Args:
        default: default value.
        help_: help text, or a function that returns it (to delay slow imports).
        word: (metavar, type) of the flag, if the field's type cannot parse the flag's value.
        how: further arguments of ``add_argument``; also ``short``, a short form such as ``-o``, and
            ``positional``, True for a positional argument.
    """
    read = {} if word is None else {"metavar": word[0], "type": word[1]}
    return field(default=default, metadata={"help": help_, **read, **how})


def add_flags(parser: Any, schema: type) -> None:
    """Add the fields of the dataclass ``schema`` to a parser.

    If the schema has a TITLE, the flags form a group with this title, described by NOTE. Fields
    named in the schema's OMIT are left out.
    """
    if title := getattr(schema, "TITLE", None):
        parser = parser.add_argument_group(title, getattr(schema, "NOTE", None))
    for each in fields(schema):
        if each.name not in getattr(schema, "OMIT", ()):
            _add_flag(parser, each)


def _add_flag(parser: Any, each: Field[Any]) -> None:
    how = dict(each.metadata)
    if callable(how["help"]):
        how["help"] = how["help"]()
    if how.pop("positional", False):
        parser.add_argument(each.name, **how)
        return
    own = next((t for t in get_args(each.type) if t is not NoneType), each.type)
    if "action" not in how:
        if own is bool:
            how["action"] = "store_true"
        else:
            how.setdefault("type", own)
    names = [name for name in (how.pop("short", None), flag_of(each.name)) if name]
    parser.add_argument(*names, default=each.default, **how)


def flag_of(name: str) -> str:
    """Return the flag of the field ``name``."""
    return "--" + name.replace("_", "-")


def refuse_removed(parser: Any, removed: Mapping[str, str]) -> None:
    """Make ``parser`` refuse removed flags; ``removed`` has an explanation for each flag."""
    for name, instead in removed.items():
        parser.add_argument(
            name, action=_Removed, nargs="?", const=instead, default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )  # fmt: skip


class _Removed(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        parser.error(f"{option} was removed; {self.const}")


class JoinedArguments(argparse.Action):
    """Action of a flag whose value may be several words, such as ``--placement interleaved 2``."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        """Set the flag's value to the words joined by spaces."""
        setattr(namespace, self.dest, " ".join(values))


def whole_number(least: int, most: int = 10**15 - 1) -> Callable[[str], int]:
    """Return a type function for integers from ``least`` to ``most``."""

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


def positive(unit: str, most: float = 1e6) -> Callable[[str], float]:
    """Return a ``type`` for argparse that parses a number from 1 / ``most`` to ``most``.

    Its error message names ``unit``.
    """

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


def one_of(*names: str) -> Callable[[str], str]:
    """Return a ``type`` for argparse that accepts only the words in ``names``.

    Unlike with ``choices`` of argparse, the error message suggests the most similar name.
    """

    def read(text: str) -> str:
        if text not in names:
            hint = did_you_mean(text, names)
            expected = f"{hint and f'{hint} '}expected {', '.join(names)}"
            raise argparse.ArgumentTypeError(f"{text!r}: {expected}")
        return text

    return read


def did_you_mean(
    word: str, known: Iterable[str], otherwise: str = "", most: int = 1, cutoff: float = 0.6
) -> str:
    """Return a question with at most ``most`` names similar to ``word``, else ``otherwise``."""
    near = difflib.get_close_matches(word, list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise
