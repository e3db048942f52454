"""Settings of the schedule of an external training loop, and the record of a call."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from megatron_epp.ir import Plan, Timed
from megatron_epp.runtime.memory_meter import Meter, NoMeter

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """Record of one executed call on this rank.

    Attributes:
        plan: The executed plan.
        records: Start and stop in seconds, and peak bytes, of every op and transfer of this rank.
        peak_bytes: Peak bytes of the chunks' activations; 0 without a meter.
    """

    plan: Plan
    records: tuple[Timed, ...]
    peak_bytes: int


def _plans(*arguments: Any) -> tuple[Plan, ...]:
    # Imported when the first plan is made, because the compiler takes a second to load.
    from megatron_epp.planner.calls.call_plan import call_plans

    return call_plans(*arguments)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the schedule; see :func:`megatron_epp.attach`."""

    timeout: timedelta = TIMEOUT
    observe: Callable[[CallRecord], None] | None = None
    make_meter: Callable[[Any], Meter] = lambda model: NoMeter()
    make_plans: Callable[..., tuple[Plan, ...]] = _plans
