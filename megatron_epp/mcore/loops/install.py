"""Puts the schedule where loops of others look it up, and takes it away again.

``megatron.core.pipeline_parallel.get_forward_backward_func`` returns one of three functions, which
it looks up in its module whenever it is called. Two of them are replaced: the pipeline without
interleaving, and no pipeline. A loop that keeps the function it was once given must be built after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules

from megatron_epp.autoload import TARGETS, WAITS_FOR
from megatron_epp.mcore.loops.loop_schedule import LoopSchedule
from megatron_epp.mcore.loops.settings import Settings


class Installation:
    """Megatron's two schedules are replaced until ``remove()``, or to the end of the context."""

    def __init__(self, settings: Settings):
        self._stock: dict[bool, Callable[..., Any]] = {}
        for several, name in TARGETS.items():
            function = getattr(schedules, name)
            # One that waits for its first call (MEGATRON_EPP=1) need wait no longer.
            self._stock[several] = getattr(function, WAITS_FOR, function)
        for name, function in zip(TARGETS.values(), self._stock.values(), strict=True):
            if hasattr(function, "__megatron_epp__"):
                raise ValueError(
                    f"install_schedule was called before, and {name} is replaced already; call "
                    "remove() on what it returned"
                )
        self.schedule = LoopSchedule(settings, dict(self._stock))
        for several, name in TARGETS.items():
            setattr(schedules, name, self._standing_in(several))

    def _standing_in(self, several: bool) -> Callable[..., Any]:
        @functools.wraps(self._stock[several])
        def forward_backward(**keywords: Any) -> Any:
            return self.schedule(several, keywords)

        forward_backward.__megatron_epp__ = self  # type: ignore[attr-defined]
        return forward_backward

    def remove(self) -> None:
        """Put Megatron's own back; a second call does nothing."""
        for several, name in TARGETS.items():
            if getattr(getattr(schedules, name), "__megatron_epp__", None) is self:
                setattr(schedules, name, self._stock[several])

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()


def installed() -> Installation | None:
    """The installation that stands in for Megatron's schedules now."""
    function = getattr(schedules, TARGETS[True])
    return getattr(function, "__megatron_epp__", None)
