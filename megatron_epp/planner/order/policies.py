"""Scheduling policies: which of them `epp` plays a chunking with."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_epp.planner.order.compiled import G, W
from megatron_epp.planner.order.list_scheduler import Policy
from megatron_epp.planner.order.problem import ScheduleProblem
from megatron_epp.planner.order.warmup import group_by_group


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """A policy in numbers that hold for any chunking.

    strict     keep to the window law; else memory alone bounds the forwards
    split      run I and W
    held       W that may wait, in mean W seconds of the stage's chunks
    patience   as in Policy
    lead       forwards beyond the window law that go before a backward
    """

    strict: bool
    split: bool = False
    held: float = 0.0
    patience: float = 0.0
    lead: int = 0

    def __str__(self) -> str:
        parts = ["1F1B order" if self.strict else "order free within memory"]
        if self.lead:
            where = "ahead of" if self.lead > 0 else "behind"
            parts.append(f"forwards {abs(self.lead)} {where} 1F1B")
        if self.split and not self.held:
            parts.append("backward split, weight gradients at once")
        elif self.split:
            parts.append("backward split, weight gradients in gaps")
            if np.isfinite(self.held):
                parts.append(f"at most {self.held:g} of them waiting")
            if self.patience:
                parts.append(f"overrunning a gap by up to {self.patience:.0%}")
        return ", ".join(parts)


def policies(
    split: bool, *, many: bool, strict: bool = False, tight: bool = False
) -> Iterator[PolicyParams]:
    """Those worth playing: a few for every chunking, or many for the best.

    strict   only those that keep to the window law
    tight    memory binds: then a whole B, which holds nothing for its W, may be better

    Which ones was chosen by hand; simulation picks among them (epp.search.GRID says what is known).
    """
    yield PolicyParams(strict=True)
    if strict:
        if split:
            for held in (0.0, 1.0, 4.0) if many else (1.0,):
                yield PolicyParams(True, True, held, 0.6)
        return
    if not split:
        for lead in (-1, 0, 1, 2, 4, 8) if many else (0, 2):
            yield PolicyParams(strict=False, lead=lead)
        return
    if tight and not many:
        yield PolicyParams(strict=False, lead=2)
    yield PolicyParams(strict=False, split=True, held=4.0, patience=0.6)
    yield PolicyParams(strict=False, split=True, held=np.inf, patience=0.8)
    yield PolicyParams(strict=False, split=True, held=1.0, patience=0.3)
    if many:
        for lead in (-1, 0, 2, 4) if tight else (0, 2):
            yield PolicyParams(strict=False, lead=lead)
        for held in (0.0, 1.0, 2.0, 4.0, 8.0, np.inf):
            for patience in (0.0, 0.3, 0.6, 1.0):
                yield PolicyParams(False, True, held, patience)
            for lead in (-2, 1, 4):
                yield PolicyParams(False, True, held, 0.6, lead)
            yield PolicyParams(True, True, held, 0.6)


def policy_of(
    style: PolicyParams, work: ScheduleProblem, sizes: np.ndarray, law: np.ndarray
) -> Policy:
    held = 0.0
    if style.held:
        fillers = (W, G) if work.vocabulary_parallel else (W,)
        held = style.held * float(sum(work.ops.seconds[kind].mean() for kind in fillers))
    if style.strict:
        return Policy(law, law, law, style.split, held, style.patience)
    count = work.chunks
    first = np.clip(law + style.lead, 0, count) if style.lead else law
    everything = np.full_like(law, count)
    groups = group_by_group(sizes, work.stages)
    return Policy(groups, first, everything, style.split, held, style.patience)
