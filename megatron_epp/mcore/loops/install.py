"""Installation of the schedule in Megatron, for external training loops, and its removal.

``megatron.core.pipeline_parallel.get_forward_backward_func`` returns one of three functions, which
it looks up in its module at every call. All three are replaced. A loop that caches the returned
function must be created after the installation.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import megatron.core
from megatron.core.pipeline_parallel import schedules

from megatron_epp.autoload import PIPELINE, TARGETS, WAITS_FOR
from megatron_epp.mcore.loops.loop_schedule import LoopSchedule
from megatron_epp.mcore.loops.settings import Settings

OLDEST = (0, 16)  # the first release with these signatures of the schedules
# Functions of Megatron's schedules that scheduling mode calls, with the required arguments.
NEEDED = {
    "forward_step": (
        "collect_non_loss_data",
        "is_first_microbatch",
        "current_microbatch",
        "is_last_stage",
    ),
    "backward_step": ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
    "deallocate_output_tensor": ("deallocate_pipeline_outputs",),
    "check_first_val_step": ("first_val_step", "forward_only", "cond"),
    "get_tensor_shapes": ("seq_length", "micro_batch_size", "decoder_seq_length", "config"),
    **dict.fromkeys(TARGETS.values(), ("forward_step_func", "data_iterator", "model")),
}


def require_megatron() -> None:
    """Raise an ImportError if Megatron is older than OLDEST or lacks a function in NEEDED."""
    version = str(getattr(megatron.core, "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise ImportError(f"megatron-core {version} is older than {OLDEST[0]}.{OLDEST[1]}")
    for name, parameters in NEEDED.items():
        function = getattr(schedules, name, None)
        if function is None:
            raise ImportError(f"megatron-core {version} has no {schedules.__name__}.{name}")
        known = inspect.signature(function).parameters
        missing = [parameter for parameter in parameters if parameter not in known]
        if missing:
            raise ImportError(
                f"megatron-core {version}: {schedules.__name__}.{name} knows no {missing[0]}"
            )


class Installation:
    """Replacement of Megatron's three schedule functions by a :class:`LoopSchedule`.

    The constructor patches ``megatron.core.pipeline_parallel.schedules``. ``remove()``, or leaving
    the ``with`` block, restores Megatron's own functions.

    Raises:
        ValueError: The schedule functions are already replaced.
    """

    def __init__(self, settings: Settings):
        self._stock: dict[str, Callable[..., Any]] = {}
        for kind, name in TARGETS.items():
            function = getattr(schedules, name)
            # MEGATRON_EPP=1 wraps the functions until their first call; replace the wrapper.
            self._stock[kind] = getattr(function, WAITS_FOR, function)
        for name, function in zip(TARGETS.values(), self._stock.values(), strict=True):
            if hasattr(function, "__megatron_epp__"):
                raise ValueError(
                    f"install_schedule was called before, and {name} is replaced already; call "
                    "remove() on what it returned"
                )
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


def installed() -> Installation | None:
    """Return the installation that currently replaces Megatron's schedules, or None."""
    function = getattr(schedules, TARGETS[PIPELINE])
    return getattr(function, "__megatron_epp__", None)


def install_where_none() -> None:
    """Replace Megatron's schedules with default settings, unless they are replaced already."""
    if installed() is None:
        Installation(Settings())
