"""Errors of plans, and helpers that quote user input in short, printable form."""

import io
import sys

MOST_QUOTED = 60
MOST_NAME = 200
MOST_OF_A_LINE = 4000


class PlanError(ValueError):
    """Invalid plan; the message names the problem, its place in the plan and what was expected."""


class Deadlock(PlanError):
    """Invalid plan whose ranks would wait for each other forever."""


def shortened(text: str, most: int = MOST_OF_A_LINE) -> str:
    """Return ``text``, shortened in the middle to at most ``most`` characters."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def first_line(error: BaseException) -> str:
    """Return the first line of the message of ``error``, or its type's name if it has none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def quoted(value: object) -> str:
    """Return ``value`` as a Python literal, cut after about MOST_QUOTED characters."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > MOST_QUOTED:
        text = text[: MOST_QUOTED - 3] + "..."
    return repr(text) if isinstance(value, str) else text


def printable(text: str) -> str:
    """Return ``text`` with non-printable characters escaped, safe to show on a terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def for_terminal(text: str) -> str:
    """Return ``text`` with lines :func:`shortened` and non-printable characters escaped."""
    return "\n".join(printable(shortened(line)) for line in text.split("\n"))


def escape_output() -> None:
    """Make stdout and stderr escape characters that their encoding does not have.

    Otherwise, a command could fail after its work, when it prints the name of its output.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def require_name(what: str, name: object) -> None:
    """Raise a ValueError unless ``name`` is printable text of 1 to MOST_NAME characters."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{what} {quoted(name)}: expected a word")
    if len(name) > MOST_NAME:
        raise ValueError(f"{what} {quoted(name)}: expected at most {MOST_NAME} characters")
    require_line(what, name)


def require_line(what: str, text: object) -> None:
    """Raise a ValueError unless ``text`` is one line of printable text; it may be empty."""
    if not isinstance(text, str):
        raise ValueError(f"{what}: expected a text")
    if not text.isprintable():
        raise ValueError(f"{what} {quoted(text)}: expected one line of printable characters")
