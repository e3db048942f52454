"""Installation of the schedule in Megatron, for external training loops, and its removal.

``megatron.core.pipeline_parallel.get_forward_backward_func`` returns one of three functions, which
it looks up in its module at every call. This module replaces the two functions for pipelines
without interleaving. A loop that caches the returned function must be created after the
installation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import megatron.core
from megatron.core.pipeline_parallel import schedules

from megatron_epp.mcore.loops.loop_schedule import NO_PIPELINE, PIPELINE, LoopSchedule
from megatron_epp.mcore.loops.settings import TIMEOUT, Settings
from megatron_epp.mcore.patching.releases import SLICES, numbers_of

# Megatron's functions by kind of pipeline.
TARGETS = {
    PIPELINE: "forward_backward_pipelining_without_interleaving",
    NO_PIPELINE: "forward_backward_no_pipelining",
}
# Functions of Megatron's schedules that slices call, with the required arguments.
NEEDED = {
    "forward_step_calc_loss": ("collect_non_loss_data", "cp_group_size", "is_last_stage"),
    "backward_step": ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
    "deallocate_output_tensor": ("deallocate_pipeline_outputs",),
    **dict.fromkeys(TARGETS.values(), ("forward_step_func", "data_iterator", "model")),
}


def require_megatron() -> None:
    """Raise a ValueError if Megatron is older than SLICES or lacks a function in NEEDED."""
    version = str(getattr(megatron.core, "__version__", ""))
    if numbers_of(version) < SLICES:
        oldest = ".".join(map(str, SLICES))
        raise ValueError(f"attach: megatron-core {version} is older than {oldest}")
    for name, parameters in NEEDED.items():
        function = getattr(schedules, name, None)
        known = {} if function is None else inspect.signature(function).parameters
        missing = [parameter for parameter in parameters if parameter not in known]
        if missing:
            lacks = "does not exist" if function is None else f"knows no {missing[0]}"
            raise ValueError(
                f"attach: megatron-core {version}: {schedules.__name__}.{name} {lacks}"
            )


class Installation:
    """Replacement of Megatron's two schedule functions by a :class:`LoopSchedule`.

    The constructor patches ``megatron.core.pipeline_parallel.schedules``. ``remove()``, or leaving
    the ``with`` block, restores Megatron's own functions.

    Raises:
        ValueError: The schedule functions are already replaced.
    """

    def __init__(self, settings: Settings):
        self._stock: dict[str, Callable[..., Any]] = {}
        for kind, name in TARGETS.items():
            self._stock[kind] = getattr(schedules, name)
            if hasattr(self._stock[kind], "__megatron_epp__"):
                raise ValueError(f"{name} is replaced already; call remove() on its installation")
        self.schedule = LoopSchedule(settings, dict(self._stock))
        for kind, name in TARGETS.items():
            setattr(schedules, name, self._standing_in(kind))

    def _standing_in(self, kind: str) -> Callable[..., Any]:
        @functools.wraps(self._stock[kind])
        def forward_backward(**keywords: Any) -> Any:
            return self.schedule(kind, keywords)

        forward_backward.__megatron_epp__ = self  # type: ignore[attr-defined]
        return forward_backward

    def remove(self) -> None:
        """Restore Megatron's own schedules; a second call does nothing."""
        for kind, name in TARGETS.items():
            if getattr(getattr(schedules, name), "__megatron_epp__", None) is self:
                setattr(schedules, name, self._stock[kind])

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()


def install_where_none(timeout: timedelta | None = None, observe: Any = None) -> None:
    """Replace Megatron's schedules, unless they are replaced already.

    Args:
        timeout: Timeout of the process groups; None: ``TIMEOUT``.
        observe: Function that is called with the CallRecord of every planned call; None: no
            function.

    Raises:
        ValueError: Megatron is too old, or lacks a function that is needed to compute slices.
    """
    require_megatron()
    if installed() is None:
        Installation(Settings(timeout=timeout or TIMEOUT, observe=observe))


def installed() -> Installation | None:
    """Return the installation that currently replaces Megatron's schedules, or None."""
    function = getattr(schedules, TARGETS[PIPELINE])
    return getattr(function, "__megatron_epp__", None)
