"""Limit of this package: an unsupported feature, listed in docs/reference/refused_flags.md."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_epp.mcore.patching import emulated_engine

type Column = Literal["training", "slices", "no_gpu"]
# Holder of settings -> whether they select the feature, or the reason why it is refused.
type Test = Callable[[Any], bool | str | None]

# Values with which a flag is not set, next to None, False, 0, "none" and [].
_UNSET = {
    "dataloader_type": "external",
    "distributed_backend": "gloo",
    "micro_batch_size": 1,
    "transformer_impl": "local",
}
_FLAGS = {"fp4": "--fp4-format", "fp8": "--fp8-format"}  # of other names than their settings
_EMULATED = ("fp8", "transformer_impl")  # what a CPU emulates with Transformer Engine


@dataclass(frozen=True, slots=True)
class Limit:
    """Feature that training with --epp, slices of external loops or CPU-only hosts do not support.

    A test is either a string of setting names separated by spaces, or a function. The string is
    true if any of the settings is set. The function returns whether the feature is used, or the
    reason for the refusal as a string. By default, the reason is built from ``what`` and
    ``instead``.

    Attributes:
        what: Description of the feature, with its flags.
        instead: What the user should do instead.
        training: Test of args; --epp refuses the flags. "" refuses nothing.
        slices: Test of the model of an external training loop; if it is true, ``attach`` refuses
            the model. With ``of_call``, test of a call of the loop; if it is true, Megatron's own
            schedule runs the call. A dict {setting of the configuration: description} refuses the
            first setting that is set, and gives its description as the reason. True applies the
            test ``training`` to the model's configuration. None refuses nothing.
        no_gpu: {setting of args: what to do instead}; CPU-only hosts refuse these settings.
        typed: Whether --epp refuses the flags on the command line. If False, flags on the command
            line are reset with a warning (replaced.py); flags that a checkpoint or a script sets
            are refused.
        of_call: Whether ``slices`` is a test of each call of a loop.
    """

    what: str
    instead: str
    training: Test | str = ""
    slices: Test | Mapping[str, str] | Literal[True] | None = None
    no_gpu: Mapping[str, str] = field(default_factory=dict)
    typed: bool = True
    of_call: bool = False

    def reason(self, column: Column, holder: Any) -> str | None:
        """Return the reason why ``holder`` is refused; None if it is not.

        ``column`` names the test to apply: ``training``, ``slices`` or ``no_gpu``. ``holder``
        is args, or for slices a model or a call, which have a ``config``.
        """
        if column == "no_gpu":
            return self._without_gpu(holder)
        test = getattr(self, column)
        if isinstance(test, Mapping):
            prefix = "" if self.of_call else "slices do not compute "
            names = (name for name in test if is_set(holder.config, name))
            return next((f"{prefix}{test[name]} ({name})" for name in names), None)
        if test is True:
            test, holder = self.training, holder.config
        used = test(holder) if callable(test) else is_set(holder, *(test or "").split())
        if isinstance(used, str) or not used:
            return used or None
        runs = "slices do not compute" if column == "slices" else "--epp does not run"
        return f"{runs} {self.what}: {self.instead}"

    def _without_gpu(self, args: Any) -> str | None:
        for name, instead in self.no_gpu.items():
            emulated = name in _EMULATED and emulated_engine.is_wanted()
            if is_set(args, name) and not emulated:
                value, flag = getattr(args, name), flag_of(name)
                shown = flag if value is True else f"{flag} {value}"
                return f"{shown}: this host has no CUDA GPU; {instead}"
        return None


def flag_of(name: str) -> str:
    """Return the flag that sets the attribute ``name`` of args."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def gpu_only(name: str, instead: str = "leave the flag out") -> Limit:
    """Return the limit of a setting of args that needs a GPU and has no other limit."""
    runs = f" other than {_UNSET[name]}" if name in _UNSET else ""
    return Limit(flag_of(name) + runs, instead, no_gpu={name: instead})


def is_set(holder: Any, *names: str) -> bool:
    """Return whether one of the settings ``names`` of args or of a configuration is set."""
    values = ((name, getattr(holder, name, None)) for name in names)
    return any(v not in (None, False, "none", [], _UNSET.get(name)) for name, v in values)
