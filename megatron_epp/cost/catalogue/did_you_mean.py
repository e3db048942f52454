"""Errors for names that nobody knows."""

import difflib
from collections.abc import Iterable


def unknown_name(what: str, name: str, known: Iterable[str], *others: str) -> str:
    """One line: the names that look like ``name``, then all. ``others`` are known as well, but
    are never what was meant."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    return f"unknown {what} {name!r}{hint} Known: {', '.join((*names, *others))}"
