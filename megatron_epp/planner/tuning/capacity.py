"""What fits on a number of devices, whatever the documents: states, and the longest document."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import PlanError
from megatron_epp.planner.feasibility import require_fit
from megatron_epp.planner.tuning.layouts import Layout

_MOST = 1 << 24  # tokens of a document that nobody asks for
_STEP = 1.01  # a layout that holds this much more is a better one


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits on a number of devices.

    layouts        that were tried
    fitting        of these, that hold the states
    best           of these, the one that holds the longest document; None: none holds any
    tokens         of that document, everything recomputed
    states_bytes   of the fullest device of ``best``
    """

    layouts: int
    fitting: int
    best: Layout | None
    tokens: int
    states_bytes: float


def longest_document(cost: Cost, least: int = 1) -> int:
    """Return the most tokens of a document that fits, 0 where one of ``least`` does not."""

    def fits(tokens: int) -> bool:
        try:
            require_fit(cost, (tokens,))
        except PlanError:
            return False
        return True

    if not fits(least):
        return 0
    low, high = least, max(2 * least, 1024)
    while high < _MOST and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def capacity(layouts: Iterable[Layout], cost_for: Callable[[Layout], Cost]) -> Capacity:
    """Return what fits; ``cost_for`` raises a ValueError where states do not."""
    tried = fitting = tokens = 0
    best: Layout | None = None
    states = 0.0
    for layout in layouts:
        tried += 1
        try:
            cost = cost_for(layout)
        except ValueError:
            continue
        fitting += 1
        if held := longest_document(cost, max(1, int(tokens * _STEP))):
            best, tokens, states = layout, held, max(cost.memory.states_bytes)
    return Capacity(tried, fitting, best, tokens, states)
