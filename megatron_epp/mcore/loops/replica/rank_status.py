"""Exchange of read shapes and errors between the ranks of a replica.

The ranks exchange statuses over the replica's control group twice per call: before and after the
ops. If a rank refuses its input, or fails in an op, all ranks raise and no rank blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


class LoopRefusal(ValueError):
    """Error: no schedule can run the input of the loop; raised on every rank."""


class RanksDiffer(LoopRefusal):
    """Error: ranks of a pipeline read their micro-batches differently."""


class LoopFailed(RuntimeError):
    """Error: a rank of this replica failed; the message contains the rank and its error."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Status that a rank sends to the other ranks of the replica.

    Attributes:
        value: Data for the other ranks, such as the shapes that this rank has read; or None.
        refusal: Message of an error in the loop's input; all ranks raise it as LoopRefusal.
        error: Message of any other error; all ranks raise it as LoopFailed.
    """

    value: Any = None
    refusal: str | None = None
    error: str | None = None


def error_text(error: Exception) -> str:
    """Return the type and message of ``error`` as one text."""
    return f"{type(error).__name__}: {error}"


def refused_by(error: Exception) -> str:
    """Return the message with which a rank refuses its micro-batches because of ``error``.

    If ``error`` is not a ValueError, the message begins with the error's type. Errors of other
    types come from a function of the loop, such as ``lengths`` or an adapter.
    """
    return str(error) if isinstance(error, ValueError) else error_text(error)


def gather_statuses(own_status: RankStatus, control: dist.ProcessGroup | None) -> list[RankStatus]:
    """All-gather the status of every rank of ``control``, in rank order. Collective.

    If ``control`` is None, the result has only this rank's status.
    """
    if control is None:
        return [own_status]
    every: list[Any] = [None] * control.size()
    dist.all_gather_object(every, own_status, group=control)
    return every


def raise_remote_failure(every: Sequence[RankStatus], control: dist.ProcessGroup | None) -> None:
    """Raise on every rank if a rank refused its input or failed.

    Raises:
        LoopRefusal: A rank refused its input; the message is from the first such rank.
        LoopFailed: A rank had another error; the message is from the first such rank.
    """
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
    """Return the common list of all ranks that have a list; None if no rank has one.

    Args:
        every: List of every rank of ``control``, in rank order; None for ranks without a list.
        what: Description of the items, used in the message.
        control: Process group of the replica; None with one rank.

    Raises:
        RanksDiffer: Two lists differ; the message names the first micro-batch that differs.
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
