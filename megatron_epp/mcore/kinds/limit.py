"""Limit of this package: an unsupported feature, listed in docs/reference/refused_flags.md."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Reason = Callable[[Any], str | None]


@dataclass(frozen=True, slots=True)
class Limit:
    """Feature that --epp, slices, planned calls or CPU-only hosts do not support.

    An attribute that is a function returns None or False if the feature is not used or is
    supported.

    Attributes:
        what: Description of the feature, with its flags.
        instead: What the user should do instead.
        epp: Function (args) -> whether the flags select the feature; --epp then refuses the flags.
        slices: Function (model of an external training loop) -> the reason why ``attach`` refuses
            the model. If the result is True, the reason is made of ``what`` and ``instead``.
        calls: Function (call of a loop) -> the reason why Megatron's own schedule runs the call.
        no_gpu: Function (args) -> the reason why CPU-only hosts refuse the flags.
        typed: Whether --epp refuses the flags if the user has typed them. If false, typed flags are
            removed with a warning (replaced.py), and refused only if they were set in another way.
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
    """Return a function that returns a description of the first setting in ``words`` that is set.

    The returned function takes a model or a call of an external training loop, and reads its
    ``config``. It returns None if no setting is set.

    Args:
        before: Text before the description of the setting.
        words: Description of each setting, by the setting's name in the configuration.
    """

    def reason(holder: Any) -> str | None:
        for name, what in words.items():
            if getattr(holder.config, name, None) not in (None, False, 0, 0.0):
                return f"{before}{what} ({name})"
        return None

    return reason


def not_computed(**words: str) -> Reason:
    """Return the function of :func:`settings`; descriptions begin with "slices do not compute"."""
    return settings("slices do not compute ", **words)


def of_config(asked: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Return a function that takes a loop's model and applies the test ``asked`` to its config."""
    return lambda model: bool(asked(model.config))
