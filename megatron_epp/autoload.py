"""MEGATRON_EPP=1: scheduling mode in every process that imports Megatron's schedules.

The mode can be turned on in four ways:

    torch, at the end of its import     entry points "torch.backends"        start()
    verl, in each of its processes      entry points "verl.plugins"          megatron_epp.plugin
    python -m megatron_epp.run          process of a script or module        switch_on()
    import megatron_epp.adaptor         a line in your script                switch_on()

Every process, including torchrun's and Ray's, runs torch's entry point before it can import
Megatron. A .pth file in site-packages would affect every Python of the environment, would not work
for editable installs, and is forbidden on some clusters. TORCH_DEVICE_BACKEND_AUTOLOAD=0 disables
torch's entry points; the other ways remain. Without MEGATRON_EPP, entry points do nothing.

Imports are deferred. When Megatron's module of schedules has been imported, its functions are
replaced by stubs. The first call of a stub installs this package's schedule. If that fails, one
line gives the reason, and Megatron's functions are restored.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "MEGATRON_EPP"
ON, OFF = ("1", "on", "true", "yes"), ("", "0", "off", "false", "no")
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
# Megatron's functions by kind of pipeline.
NO_PIPELINE, PIPELINE, INTERLEAVED = "no pipeline", "pipeline", "interleaved"
TARGETS = {
    PIPELINE: "forward_backward_pipelining_without_interleaving",
    NO_PIPELINE: "forward_backward_no_pipelining",
    INTERLEAVED: "forward_backward_pipelining_with_interleaving",
}
WAITS_FOR = "__megatron_epp_waits_for__"  # attribute of a stub: Megatron's function
CONNECTIONS, QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", "32"


def asked(value: str | None) -> bool:
    """Return whether ``value`` of the variable MEGATRON_EPP requests scheduling mode.

    Raises:
        ValueError: if ``value`` is neither in ON nor in OFF.
    """
    word = (value or "").strip().lower()
    if word not in ON + OFF:
        raise ValueError(f"{VARIABLE}={value}: expected 1 (level 0) or 0 (nothing)")
    return word in ON


def start() -> None:
    """Turn scheduling mode on if MEGATRON_EPP requests it.

    This function raises no error, because an error would abort the import that calls it.
    """
    value = os.environ.get(VARIABLE)
    if not value:
        return
    try:
        if asked(value):
            switch_on()
    except ValueError as refusal:
        # Only processes that import Megatron report it.
        words = f"{refusal}; Megatron's own schedule runs"
        _when_imported(lambda schedules: say(words))


def switch_on() -> None:
    """Replace Megatron's schedules when they are imported, or now if they already are."""
    _when_imported(stand_in)


class NoInstallation:
    """Result of ``install_schedule`` if Megatron's schedule stays; it prints the reason."""

    def __init__(self, reason: str):
        self.reason = reason
        say(f"megatron_epp {_version()}: Megatron's own schedule runs: {reason}")

    def remove(self) -> None:
        """Do nothing: Megatron's functions were not replaced."""

    def __enter__(self) -> "NoInstallation":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _when_imported(act: Callable[[ModuleType], None]) -> None:
    if SCHEDULES in sys.modules:
        act(sys.modules[SCHEDULES])
    elif not any(isinstance(finder, _SchedulesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _SchedulesFinder(act))


class _SchedulesFinder(MetaPathFinder):
    """Import finder that calls ``act`` after Megatron's module of schedules is imported."""

    def __init__(self, act: Callable[[ModuleType], None]):
        self.act = act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != SCHEDULES:
            return None
        sys.meta_path.remove(self)  # removed before the other finders are asked
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(spec.loader, self.act)
        return spec


class _ActingLoader(Loader):
    def __init__(self, loader: Loader, act: Callable[[ModuleType], None]):
        self.loader, self.act = loader, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.act(module)

    def __getattr__(self, name: str) -> Any:  # get_source, get_filename, ...
        return getattr(self.loader, name)


def stand_in(schedules: ModuleType) -> None:
    """Replace the functions in TARGETS by stubs, which install this package's schedule."""
    missing = [name for name in TARGETS.values() if not hasattr(schedules, name)]
    if missing:
        say(f"{SCHEDULES} has no {missing[0]}; Megatron's own schedule runs")
        return
    _open_queues()
    for name in TARGETS.values():
        own = getattr(schedules, name)
        if not hasattr(own, "__megatron_epp__") and not hasattr(own, WAITS_FOR):
            setattr(schedules, name, _waiting(schedules, name, own))


def _waiting(schedules: ModuleType, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward_backward(*arguments: Any, **keywords: Any) -> Any:
        if getattr(schedules, name) is forward_backward:
            _bring_in(schedules, keywords.get("forward_step_func"))
        # A loop may have stored this stub: call the module's current function.
        return getattr(schedules, name)(*arguments, **keywords)

    setattr(forward_backward, WAITS_FOR, own)
    return forward_backward


def _bring_in(schedules: ModuleType, forward_step: Any) -> None:
    """Replace the stubs by this package's schedule or, if that fails, by Megatron's functions.

    The log names the framework that ``forward_step`` belongs to.
    """
    for name in TARGETS.values():
        function = getattr(schedules, name)
        setattr(schedules, name, getattr(function, WAITS_FOR, function))
    try:
        from megatron_epp.frameworks.known import framework_of

        if isinstance(_package().install_schedule(), NoInstallation):
            return  # it has logged the reason
        framework = framework_of(forward_step)
        say_mode("level 0", framework.name if framework else "a loop of its own")
    except Exception as error:  # whatever the error, the job continues
        say(
            f"megatron_epp {_version()} cannot run here, Megatron's own schedule does: "
            f"{first_line(error)}"
        )


def say_mode(level: str, where: str) -> None:
    """Log that scheduling mode (level 0) or slicing mode (level 1) is on, and in which loop."""
    say(f"megatron_epp {_version()}: {level}, {_megatron()}, {where}")


def first_line(error: Exception) -> str:
    """Return the type and the first line of ``error``, for a warning."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _megatron() -> str:
    core = sys.modules.get("megatron.core")
    return f"megatron-core {getattr(core, '__version__', 'of an unknown version')}"


def _package() -> Any:
    return sys.modules[__package__]  # already imported; an import statement would be circular


def _version() -> str:
    return getattr(_package(), "__version__", "of a checkout")


def _open_queues() -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS unless it is set or CUDA is initialised.

    With one hardware queue, ops wait for messages that were posted earlier. Some Megatron jobs need
    the value 1, so an existing value stays, and the schedule reports the cost of that value.
    """
    torch = sys.modules.get("torch")
    started = torch is not None and torch.cuda.is_initialized()
    if CONNECTIONS not in os.environ and not started:
        os.environ[CONNECTIONS] = QUEUES


def say(words: str, by: int = 0) -> None:
    """Print one line on stderr on rank ``by``.

    This does not use logging: some frameworks (Megatron-Bridge) filter the warnings of all loggers,
    and users must see whether the mode is on.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        own_rank = str(distributed.get_rank())
    else:
        own_rank = os.environ.get("RANK", "0")
    if own_rank == str(by):
        print(words, file=sys.stderr, flush=True)
