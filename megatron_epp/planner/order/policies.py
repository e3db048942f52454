"""Scheduling policies that planner `epp` tries, and policies with a given warm-up length."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.planner.order.compiled import G, W
from megatron_epp.planner.order.list_scheduler import Policy
from megatron_epp.planner.order.problem import ScheduleProblem
from megatron_epp.planner.order.warmup import filling_forwards

# For several stages per rank: factors on the number of forwards that fill the pipeline once
# (WARMER), and pairs of ``deep`` and ``strict`` (TURNS). Chosen by hand.
WARMER = (0.75, 1.0, 1.5, 2.5)
TURNS = ((True, False), (False, False), (True, True))
PATIENCE = 0.5  # Policy.patience
# PolicyParams.unsplit of late_splits, and triples of ``deep``, ``strict`` and ``unsplit``.
UNSPLIT = (0.5, 0.7, 0.8, 0.9, 0.95)
SPLIT_TURNS = ((True, False, 0.0), (False, False, 0.0), (True, False, 0.8), (True, True, 0.8))


@dataclass(frozen=True, slots=True)
class PolicyParams:
    """Parameters of a policy that apply to any chunking.

    Attributes:
        strict: whether the in-flight limit holds; otherwise only memory limits the forwards.
        split: whether to run I and W instead of B.
        held: maximum time of a rank's waiting W and G, in mean times of one W plus one G.
        patience: see :class:`Policy`.
        lead: F has priority over B up to the in-flight limit plus this number.
        warm: factor on the in-flight limit if ranks have several stages.
        deep: see :class:`Policy`; used if ranks have several stages.
        unsplit: fraction of a rank's backwards that run as B before the first I.
    """

    strict: bool
    split: bool = False
    held: float = 0.0
    patience: float = 0.0
    lead: int = 0
    warm: float = 1.0
    deep: bool = True
    unsplit: float = 0.0

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
        if self.unsplit:
            parts.append(f"but for the first {self.unsplit:.0%}")
        return ", ".join(parts)


def policies(
    split: bool, *, many: bool, tight: bool = False, placed: bool = False
) -> Iterator[PolicyParams]:
    """Yield the policies to try: a few for every chunking, or many for the best chunking.

    The policies were chosen by hand; simulation finds the best of them for each chunking.

    Args:
        split: whether backwards may be split.
        many: whether to yield many policies.
        tight: whether memory is tight. Unsplit backwards may then be better, because a B holds no
            bytes for a W.
        placed: whether ranks have several stages.
    """
    if placed:
        yield from _placed_policies(split, many=many, tight=tight)
        return
    yield PolicyParams(strict=True)
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


def _placed_policies(split: bool, *, many: bool, tight: bool) -> Iterator[PolicyParams]:
    for warm in WARMER if many else WARMER[:2]:
        for deep, fixed in TURNS:
            if not split or tight or many:
                yield PolicyParams(fixed, warm=warm, deep=deep)
        for deep, fixed, unsplit in SPLIT_TURNS if split else ():
            yield PolicyParams(fixed, True, np.inf, PATIENCE, warm=warm, deep=deep, unsplit=unsplit)
    if many and split:
        for warm in WARMER[:2]:
            for held in (1.0, 4.0):
                for patience in (0.3, 0.6, 1.0):
                    yield PolicyParams(False, True, held, patience, warm=warm)


def late_splits(policy: PolicyParams) -> Iterator[PolicyParams]:
    """Yield variants of ``policy`` that split only a rank's last backwards.

    I and W take longer than B, so splitting pays only where W fills gaps. Most gaps that W can fill
    are in the drain of the pipeline.
    """
    for unsplit in UNSPLIT:
        yield dataclasses.replace(
            policy, split=True, held=np.inf, patience=PATIENCE, unsplit=unsplit
        )


def policy_of(style: PolicyParams, work: ScheduleProblem, limit: np.ndarray) -> Policy:
    """Return the policy with the parameters ``style`` for the chunks of ``work``.

    Args:
        style: parameters of the policy.
        work: scheduling problem of the chunks.
        limit: [stages, chunks] number of forwards before each backward (planner.order.warmup), or
            [ranks, backwards] if ranks have several stages.
    """
    held = 0.0
    if style.held:
        fillers = (W, G) if work.vocabulary_parallel else (W,)
        held = style.held * float(sum(work.ops.seconds[kind].mean() for kind in fillers))
    how = style.split, held, style.patience, style.deep, int(style.unsplit * limit.shape[1])
    if work.place:
        number = np.arange(limit.shape[1])
        first = number + np.rint((limit - number) * style.warm).astype(np.int64) + style.lead
        most = first if style.strict else np.full_like(first, work.stages * work.chunks)
        return Policy(np.zeros_like(first), first, most, *how)
    if style.strict:
        return Policy(limit, limit, limit, *how)
    count = work.chunks
    first = np.clip(limit + style.lead, 0, count) if style.lead else limit
    everything = np.full_like(limit, count)
    needed = work.last_of_group[work.backward_order] + 1
    groups = np.repeat(needed[None], work.stages, axis=0)
    return Policy(groups, first, everything, *how)


def warm_up_policy(place: Sequence[int], chunks: int, warm: np.ndarray, **how: bool) -> Policy:
    """Return a policy with ``warm`` [ranks] forwards in flight before a rank's backwards.

    Args:
        place: rank of every stage.
        chunks: number of chunks.
        warm: [ranks] number of forwards in flight before backwards.
        how: ``strict``: whether ``warm`` also limits the forwards in flight. ``split`` and
            ``deep``: see :class:`Policy`.
    """
    backwards = np.arange(chunks * int(np.bincount(place).max()))
    first = backwards[None] + warm[:, None]
    most = first if how.pop("strict") else np.full_like(first, len(place) * chunks)
    return Policy(np.zeros_like(first), first, most, patience=PATIENCE, **how)


def warm_up_policies(
    place: Sequence[int], sizes: np.ndarray, splits: Sequence[bool]
) -> Iterator[tuple[Policy, str]]:
    """Yield policies with shorter and longer warm-ups, each with a description.

    ``place`` contains the rank of every stage, and ``sizes`` [groups] the number of chunks of every
    group (sliced document or pack). ``splits`` lists the values of Policy.split to try.
    """
    own, fill = np.bincount(place), filling_forwards(sizes, place)
    for factor in WARMER:
        warm = np.maximum(np.rint(fill * factor), own).astype(np.int64)
        for split in splits:
            for deep, strict in TURNS:
                flags = {"split": split, "deep": deep, "strict": strict}
                how = warm_up_text(**flags, warm=factor)
                yield warm_up_policy(place, int(sizes.sum()), warm, **flags), how


def warm_up_text(*, strict: bool, split: bool, deep: bool, warm: float = 1.0) -> str:
    """Return the description of a policy of :func:`warm_up_policy`."""
    held, patience = (np.inf, PATIENCE) if split else (0.0, 0.0)
    return str(PolicyParams(strict, split, held, patience, warm=warm, deep=deep))
