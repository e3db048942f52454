"""Optional plug-in that adds methods without a pipeline to the rows of the command ``compare``.

The methods are in ``scripts/bench`` of a checkout, and not in the installed wheel.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import COMPARISON_METHODS
from megatron_epp.planner.result import PlannerResult

Method = Callable[[Sequence[int], Cost, Options], PlannerResult]
_FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "bench"
_PACKAGE = "device_groups"
ABSENT = (
    f"{' and '.join(COMPARISON_METHODS)} are absent: these comparison methods are part of a "
    "checkout, not of the installed package."
)


@functools.cache
def comparison_methods() -> Mapping[str, Method]:
    """Return the methods by name, if this package runs from a checkout; else an empty mapping."""
    if not (_FOLDER / _PACKAGE / "__init__.py").is_file():
        return {}
    if str(_FOLDER) not in sys.path:
        sys.path.append(str(_FOLDER))
    methods: Mapping[str, Method] = import_module(_PACKAGE).METHODS
    return methods
