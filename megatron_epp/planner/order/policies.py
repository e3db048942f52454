"""Scheduling policies: which of them `epp` plays a chunking with, and those of warm-ups alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.planner.order.compiled import G, W
from megatron_epp.planner.order.list_scheduler import Policy
from megatron_epp.planner.order.problem import ScheduleProblem
from megatron_epp.planner.order.warmup import filling_forwards, group_by_group

# Of ranks with several stages: times the forwards that fill the pipeline once; which forward goes
# first (``deep``), and whether no more forwards are taken (``strict``). By hand.
WARMER = (0.75, 1.0, 1.5, 2.5)
TURNS = ((True, False), (False, False), (True, True))
PATIENCE = 0.5  # of Policy


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """A policy in numbers that hold for any chunking.

    strict     keep to the window law; else memory alone bounds the forwards
    split      run I and W
    held       W that may wait, in mean W seconds of the stage's chunks
    patience   as in Policy
    lead       forwards beyond the window law that go before a backward

    and where a rank has several stages:

    warm       times the forwards of the window law
    deep       as in Policy
    """

    strict: bool
    split: bool = False
    held: float = 0.0
    patience: float = 0.0
    lead: int = 0
    warm: float = 1.0
    deep: bool = True

    def __str__(self) -> str:
        parts = ["1F1B order" if self.strict else "order free within memory"]
        if self.lead:
            where = "ahead of" if self.lead > 0 else "behind"
            parts.append(f"forwards {abs(self.lead)} {where} 1F1B")
        if self.warm != 1:
            parts.append(f"warm-up x {self.warm:g}")
        if not self.deep:
            parts.append("first stages first")
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
    split: bool, *, many: bool, strict: bool = False, tight: bool = False, placed: bool = False
) -> Iterator[PolicyParams]:
    """Those worth playing: a few for every chunking, or many for the best.

    strict   only those that keep to the window law
    tight    memory binds: then a whole B, which holds nothing for its W, may be better
    placed   ranks have several stages

    Which ones was chosen by hand; simulation picks among them (epp.search.GRID says what is known).
    """
    if placed:
        yield from _placed_policies(split, many=many, strict=strict, tight=tight)
        return
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


def _placed_policies(
    split: bool, *, many: bool, strict: bool, tight: bool
) -> Iterator[PolicyParams]:
    for warm in WARMER if many else WARMER[:2]:
        for deep, fixed in TURNS:
            if strict and not fixed:
                continue
            if not split or tight or many:
                yield PolicyParams(fixed, warm=warm, deep=deep)
            if split:
                yield PolicyParams(fixed, True, np.inf, PATIENCE, warm=warm, deep=deep)
    if many and split:
        for warm in WARMER[:2]:
            for held in (1.0, 4.0):
                for patience in (0.3, 0.6, 1.0):
                    yield PolicyParams(strict, True, held, patience, warm=warm)


def policy_of(
    style: PolicyParams, work: ScheduleProblem, sizes: np.ndarray, limit: np.ndarray
) -> Policy:
    held = 0.0
    if style.held:
        fillers = (W, G) if work.vocabulary_parallel else (W,)
        held = style.held * float(sum(work.ops.seconds[kind].mean() for kind in fillers))
    how = style.split, held, style.patience
    if work.place:
        number = np.arange(limit.shape[1])
        first = number + np.rint((limit - number) * style.warm).astype(np.int64) + style.lead
        most = first if style.strict else np.full_like(first, work.stages * work.chunks)
        return Policy(np.zeros_like(first), first, most, *how, style.deep)
    if style.strict:
        return Policy(limit, limit, limit, *how)
    count = work.chunks
    first = np.clip(limit + style.lead, 0, count) if style.lead else limit
    everything = np.full_like(limit, count)
    groups = group_by_group(sizes, work.stages)
    return Policy(groups, first, everything, *how)


def warm_up_policy(place: Sequence[int], chunks: int, warm: np.ndarray, **how: bool) -> Policy:
    """Return a policy with ``warm`` [ranks] forwards in flight on a rank before its backwards.

    ``strict``: and never more forwards. ``split``, ``deep``: of Policy.
    """
    backwards = np.arange(chunks * int(np.bincount(place).max()))
    first = backwards[None] + warm[:, None]
    most = first if how.pop("strict") else np.full_like(first, len(place) * chunks)
    return Policy(np.zeros_like(first), first, most, patience=PATIENCE, **how)


def warm_up_policies(
    place: Sequence[int], sizes: np.ndarray, splits: Sequence[bool]
) -> Iterator[tuple[Policy, str]]:
    """Yield shorter and longer warm-ups for groups of ``sizes`` chunks, and a text on each.

    Backwards are whole and split as ``splits`` says.
    """
    own, fill = np.bincount(place), filling_forwards(sizes, place)
    for factor in WARMER:
        warm = np.maximum(np.rint(fill * factor), own).astype(np.int64)
        for split in splits:
            how = f"{'split' if split else 'whole'} backwards, warm-up x {factor:g}"
            for deep, strict in TURNS:
                flags = {"split": split, "deep": deep, "strict": strict}
                yield warm_up_policy(place, int(sizes.sum()), warm, **flags), how
