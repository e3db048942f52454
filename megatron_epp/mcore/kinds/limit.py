"""A feature that does not run: where, and what to do; a row of docs/reference/refused_flags.md."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Reason = Callable[[Any], str | None]


@dataclass(frozen=True, slots=True)
class Limit:
    """A feature that some places do not run.

    Attributes:
        what: Description with its flags.
        instead: What to do.
        epp: Whether flags ask for it; --epp then refuses.
        slices: Reason if a loop's model asks for it, True for the row's own text; `attach` then
            refuses.
        calls: Reason if a loop's call asks for it; Megatron's own schedule then runs the call.
        no_gpu: Reason if flags ask for it; CPU-only hosts then refuse.
        typed: Whether --epp refuses its flags if typed; else they are removed with a warning
            (replaced.py), and refused if they come another way.
    """

    what: str
    instead: str
    epp: Callable[[Any], Any] | None = None
    slices: Callable[[Any], str | bool | None] | None = None
    calls: Reason | None = None
    no_gpu: Reason | None = None
    typed: bool = True


def any_of(*names: str, harmless: tuple[Any, ...] = ()) -> Callable[[Any], bool]:
    """Return a function that tests whether one of the flags ``names`` is set.

    A flag is set if its value is not None, False or one of ``harmless``.
    """

    def asked(args: Any) -> bool:
        values = [getattr(args, name, None) for name in names]
        return any(v is not None and v is not False and v not in harmless for v in values)

    return asked


def settings(before: str = "", **words: str) -> Reason:
    """Return a function that returns a text about the first setting that a configuration has.

    The function takes a model or a call of a loop, and returns None without such a setting.

    Args:
        before: Text before the setting's description.
        words: Description of each setting, by its name in the configuration.
    """

    def reason(holder: Any) -> str | None:
        for name, what in words.items():
            if getattr(holder.config, name, None) not in (None, False, 0, 0.0):
                return f"{before}{what} ({name})"
        return None

    return reason


def not_computed(**words: str) -> Reason:
    """Return :func:`settings` with a text that says that slices do not compute the setting."""
    return settings("slices do not compute ", **words)


def of_config(asked: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Return a function that applies ``asked`` to the configuration of a loop's model."""
    return lambda model: bool(asked(model.config))
