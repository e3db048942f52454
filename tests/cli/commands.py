"""Command lines that are run in this process, and what they show."""

from typing import Any

from megatron_epp.__main__ import main

LENGTHS = (9000, 1500, 900, 300, 12, 4000, 2500)


def printed(capsys: Any, *words: object) -> Any:
    """Both streams of a command that does what it is asked."""
    assert main(list(map(str, words))) == 0
    return capsys.readouterr()


def said(capsys: Any, *words: object) -> str:
    return printed(capsys, *words).out


def refused(capsys: Any, *words: object) -> str:
    """The one line of a refusal."""
    assert main(list(map(str, words))) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("megatron_epp: error: ")
    assert shown.err.count("\n") == 1 and shown.err.endswith("\n")
    return shown.err
