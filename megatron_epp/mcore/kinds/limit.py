"""A feature that does not run: where, and what to do; a row of docs/reference/support.md."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Reason = Callable[[Any], str | None]


@dataclass(frozen=True, slots=True)
class Limit:
    """A feature that some places do not run.

    what      it in words, with its flags
    instead   what to do
    epp       whether flags ask for it, which --epp then refuses
    slices    text on a loop's model that asks for it, which `attach` then refuses; True: the row's
    calls     text on a loop's call that asks for it, which Megatron's own schedule then runs
    no_gpu    text on flags that ask for it, which hosts without a GPU refuse
    typed     whether --epp refuses its flags where they are typed; else they are taken out there
              with a warning (replaced.py), and refused where they come another way
    """

    what: str
    instead: str
    epp: Callable[[Any], Any] | None = None
    slices: Callable[[Any], str | bool | None] | None = None
    calls: Reason | None = None
    no_gpu: Reason | None = None
    typed: bool = True


def any_of(*names: str, harmless: tuple[Any, ...] = ()) -> Callable[[Any], bool]:
    """Whether one of the flags has a value other than None, False and the harmless ones."""

    def asked(args: Any) -> bool:
        values = [getattr(args, name, None) for name in names]
        return any(v is not None and v is not False and v not in harmless for v in values)

    return asked


def settings(before: str = "", **words: str) -> Reason:
    """Text on the first of these settings that the configuration of a model, or a call, has."""

    def reason(holder: Any) -> str | None:
        for name, what in words.items():
            if getattr(holder.config, name, None) not in (None, False, 0, 0.0):
                return f"{before}{what} ({name})"
        return None

    return reason


def not_computed(**words: str) -> Reason:
    """Text on the first of these settings with which slices would compute something else."""
    return settings("slices do not compute ", **words)


def of_config(asked: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """The same asked of a loop's model, whose configuration has the flags' names."""
    return lambda model: bool(asked(model.config))
