"""Errors of a plan, and how messages quote what users gave: short, and printable."""

MOST_QUOTED = 60
MOST_NAME = 200
MOST_OF_A_LINE = 4000


class PlanError(ValueError):
    """A plan that breaks a rule: one line says what, where and what was expected."""


class Deadlock(PlanError):
    """A plan whose stages would wait for each other forever."""


def shortened(text: str, most: int = MOST_OF_A_LINE) -> str:
    """Return ``text``; of a longer one the beginning and the end, ``most`` characters in all."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def quoted(value: object) -> str:
    """Return ``value`` as Python writes it; of a long one the beginning."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > MOST_QUOTED:
        text = text[: MOST_QUOTED - 3] + "..."
    return repr(text) if isinstance(value, str) else text


def printable(text: str) -> str:
    """Return ``text`` on one line: what a terminal would obey instead of print is escaped."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def for_terminal(text: str) -> str:
    """Return ``text``, of one line or several, as a terminal may have it."""
    return "\n".join(printable(shortened(line)) for line in text.split("\n"))


def require_name(what: str, name: object) -> None:
    """Raise a ValueError unless ``name`` is a word or more, in one line of printable text."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{what} {quoted(name)}: expected a word")
    if len(name) > MOST_NAME:
        raise ValueError(f"{what} {quoted(name)}: expected at most {MOST_NAME} characters")
    require_line(what, name)


def require_line(what: str, text: object) -> None:
    """Raise a ValueError unless ``text`` is one line of printable text, maybe an empty one."""
    if not isinstance(text, str):
        raise ValueError(f"{what}: expected a text")
    if not text.isprintable():
        raise ValueError(f"{what} {quoted(text)}: expected one line of printable characters")
