"""Messages between the ranks of a replica around a call: what they read, what went wrong.

Two small exchanges over the replica's control group, before the call's ops and behind them. A rank
that refuses its input, or fails in an op, is heard by all others: all of them raise, none waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


class LoopRefusal(ValueError):
    """Input of a loop that no schedule can run; raised on every rank, in one line."""


class RanksDiffer(LoopRefusal):
    """Ranks of a pipeline read their micro-batches differently."""


class LoopFailed(RuntimeError):
    """Another rank of this replica failed; says which, and in which words."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """``value`` of one rank, or its ``refusal`` (a user's mistake), or the ``error`` it met."""

    value: Any = None
    refusal: str | None = None
    error: str | None = None


def error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def refused_by(error: Exception) -> str:
    """Why micro-batches cannot be read: a refusal's own words, or what a function of the loop's
    (lengths, an adapter) ended in."""
    return str(error) if isinstance(error, ValueError) else error_text(error)


def gather_statuses(own_status: RankStatus, control: dist.ProcessGroup | None) -> list[RankStatus]:
    """Every rank's word, by its place in ``control``. Collective; None: this rank is alone."""
    if control is None:
        return [own_status]
    every: list[Any] = [None] * control.size()
    dist.all_gather_object(every, own_status, group=control)
    return every


def raise_remote_failure(every: Sequence[RankStatus], control: dist.ProcessGroup | None) -> None:
    """LoopRefusal: a rank refused its input, in the first such rank's words on every rank.
    LoopFailed: a rank met an error of another kind; that rank itself raises the error."""
    for place, status in enumerate(every):
        if status.refusal is not None:
            raise LoopRefusal(_message(place, status.refusal, control))
    for place, status in enumerate(every):
        if status.error is not None:
            raise LoopFailed(_message(place, status.error, control))


def _message(place: int, words: str, control: dist.ProcessGroup | None) -> str:
    if control is None or control.size() == 1:
        return words
    return f"rank {dist.get_global_rank(control, place)}: {words}"


def agreed(every: Sequence[Sequence[Any] | None], what: str, control: Any) -> list[Any] | None:
    """The list that all ranks which know one agree on; None where no rank knows one.

    ``every``: by place in ``control``, None from ranks that know nothing. RanksDiffer: two
    ranks differ, with the number of the first micro-batch in which they do.
    """
    known = [(place, items) for place, items in enumerate(every) if items is not None]
    if not known:
        return None
    first_place, first = known[0]
    for place, items in known[1:]:
        for number, (one, other) in enumerate(zip(first, items, strict=True)):
            if one != other:
                ranks = (
                    (first_place, place)
                    if control is None
                    else (dist.get_global_rank(control, p) for p in (first_place, place))
                )
                a, b = ranks
                raise RanksDiffer(
                    f"micro-batch {number} differs over ranks: {what} {one} on rank {a}, {other} "
                    f"on rank {b}; expected the same micro-batches on all ranks of a pipeline"
                )
    return list(first)
