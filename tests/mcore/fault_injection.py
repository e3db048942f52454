"""Fault injection: what certificates must notice.

A table of faults is a file of its own in a folder ``faults``, run inside each rank
(``Trial.interfere``): ``FAULTS`` names the fault of every batch, ``around`` injects them in turn.
"""

import ast
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from inspect import getattr_static
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron_epp.certify.batches import Frame, RandomBatch
from megatron_epp.certify.command import BOUND, BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import FLOAT64, Trial
from tests.certify.backend import certify_checked

Fault = Callable[[], AbstractContextManager]
Faults = Mapping[str, Fault]
nothing: Fault = nullcontext
FAULTS = Path(__file__).with_name("faults")

# ------------------------------------------------------------------ inside a rank


def fault(owner: object, name: str, replacement: Callable[..., Any]) -> Fault:
    """Return a fault that puts ``replacement`` in the place of the function ``owner.name``.

    The first argument of ``replacement`` is the original, the others are those of the call.
    """

    def inject() -> AbstractContextManager:
        original = getattr(owner, name)

        @wraps(original)
        def faulty(*arguments: Any, **named: Any) -> Any:
            return replacement(original, *arguments, **named)

        static = isinstance(getattr_static(owner, name), staticmethod)
        return patch.object(owner, name, staticmethod(faulty) if static else faulty)

    return inject


def in_turn(faults: Faults) -> Callable[[int], AbstractContextManager]:
    """Return ``around``: the next fault in every batch, after the last one the first."""
    following = cycle(faults.values())
    return lambda number: next(following)()


# ------------------------------------------------------------------ in the test


def names(table: Path) -> tuple[str, ...]:
    """Return the names of a table's faults in order, without its ranks' imports."""
    for line in ast.parse(table.read_text()).body:
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "FAULTS":
            return tuple(ast.literal_eval(key) for key in line.value.keys)
    raise AssertionError(f"{table}: no FAULTS")


def inject(
    table: Path, trial: Trial, show: Callable[[str], None] = lambda line: None
) -> dict[str, BatchVerdict]:
    """Certify a batch with each fault of ``table``, in order."""
    faults = names(table)
    trial = replace(trial, batches=len(faults), interfere=table)
    return dict(zip(faults, certify_checked(trial, show), strict=True))


def inject_alone(
    table: Path, model: str, seed: int, dtype: str = FLOAT64
) -> dict[str, BatchVerdict]:
    """Certify a batch with each fault in one process."""
    models = (tuple(model.split()),)
    return inject(table, Trial(Degrees(1, 1, 1), models, seed=seed, dtype=dtype))


def first_seed(
    table: Path, frame: Frame, shows: Callable[[str, RandomBatch], bool], likely: int = 0
) -> int:
    """Return a seed with which every fault of ``table`` shows in its batch, ``likely`` if it is."""
    faults = list(enumerate(names(table)))
    return next(
        seed
        for seed in (likely, *range(10_000))
        if all(shows(fault, frame.draw(seed, number)) for number, fault in faults)
    )


def require_shown(batch: BatchVerdict, fault: str) -> None:
    """Wrong numbers, far beyond the bound, and no other complaint; none where nothing is broken."""
    if "nothing" in fault:
        assert batch.passed, batch
        return
    assert not batch.passed and not batch.problems, batch
    assert batch.gradient_error > 1e6 * BOUND, batch
