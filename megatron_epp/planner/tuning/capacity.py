"""Memory capacity of a job: whether the model states fit, and the longest document that fits."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import PlanError
from megatron_epp.planner.feasibility import require_fit
from megatron_epp.planner.tuning.layouts import Layout

_MOST = 1 << 24  # upper bound of the search, in tokens; no job has longer documents
_STEP = 1.01  # a later layout replaces the best one only if it holds this many times the tokens


@dataclass(frozen=True, slots=True)
class Capacity:
    """Result of :func:`capacity` for one number of devices.

    Attributes:
        layouts: number of layouts (sets of parallel degrees) tried.
        fitting: number of layouts in which the model states fit.
        best: layout with the highest limit; None if no document fits in any layout.
        tokens: limit of ``best``: tokens of the longest document that fits if all layers are
            recomputed; 0 if none fits.
        states_bytes: bytes of model states on the fullest device of ``best``; 0 if there is none.
    """

    layouts: int
    fitting: int
    best: Layout | None
    tokens: int
    states_bytes: float


def longest_document(cost: Cost, least: int = 1) -> int:
    """Return the length in tokens of the longest document that fits in memory.

    The result is up to 1/256 too small. It is 0 if a document of ``least`` tokens does not fit.
    Documents of more than about 2^24 tokens are not tried.
    """

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
    """Return in how many layouts the model states fit, and the layout with the highest limit.

    A layout's limit is the length of the longest document that fits in memory. A later layout
    replaces an earlier one only if its limit is at least about 1% higher.

    ``cost_for`` must return the cost model of a layout. It must raise a ValueError if the model
    states do not fit.
    """
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
