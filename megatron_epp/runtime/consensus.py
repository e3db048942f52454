"""Collectives on the host after which all ranks have the same plan, or all ranks fail."""

import hashlib
import socket
import struct
from collections.abc import Buffer, Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.ir import PlanError


def broadcast_text(
    text: str | None, error: str | None, group: dist.ProcessGroup, source: int = 0
) -> str:
    """Broadcast ``text``, or ``error``, from rank ``source`` of a gloo group.

    Args:
        text: text that ``source`` sends; ignored on other ranks.
        error: error message that ``source`` sends instead of ``text``; None to send ``text``.
            Ignored on other ranks.
        group: a gloo group.
        source: rank in the group that sends.

    Returns:
        The text of ``source``; "" if it is None.

    Raises:
        PlanError: on every rank, if ``source`` sends an error.
    """
    answer = [(text or "", error)]
    dist.broadcast_object_list(answer, group=group, group_src=source)
    received, refused = answer[0]
    if refused is not None:
        raise PlanError(refused)
    return received


def broadcast_result(
    make: Callable[[], str | None], group: dist.ProcessGroup, source: int = 0
) -> str:
    """Call ``make`` on rank ``source`` of a gloo ``group``; return its text on all ranks.

    The result is "" if ``make`` returns None.

    Raises:
        PlanError: on all ranks, if ``make`` raises a ValueError.
    """
    text = error = None
    if group.rank() == source:
        try:
            text = make()
        except ValueError as refusal:
            error = str(refusal)
    return broadcast_text(text, error, group, source)


def largest(values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """All-reduce ``values`` to their element-wise maximum over a CPU ``group``."""
    every = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(every, dist.ReduceOp.MAX, group=group)
    return every.tolist()


def digest_bounds(text: str) -> tuple[float, ...]:
    """Return two 32-bit pieces of the digest of ``text``, followed by their negatives.

    If ranks all-reduce these numbers by maximum, :func:`same_digests` can compare all texts.
    """
    pieces = [float(piece) for piece in struct.unpack("<2I", digest(text.encode())[:8])]
    return (*pieces, *(-piece for piece in pieces))


DIGEST_NUMBERS = 4  # length of digest_bounds; small, because it is reduced in every iteration


def same_digests(bounds: Sequence[float]) -> bool:
    """Return whether all ranks' texts are equal, given the maxima of their digest bounds."""
    half = DIGEST_NUMBERS // 2
    return all(most == -least for most, least in zip(bounds[:half], bounds[half:], strict=True))


def require_same(facts: Mapping[str, str], group: dist.ProcessGroup, expected: str) -> None:
    """All-gather the ``facts`` that ranks of ``group`` see, and check that they are equal.

    Args:
        facts: for each flag or folder, a text that describes its state on this rank.
        group: a CPU group.
        expected: the error message's text after "expected".

    Raises:
        PlanError: on every rank, if two ranks see different facts.
    """
    every = all_gathered((socket.gethostname(), dict(facts)), group)
    first_host, first = every[0]
    for where in dict.fromkeys(key for _, seen in every for key in seen):
        odd = [n for n, (_, seen) in enumerate(every) if seen.get(where) != first.get(where)]
        if odd:
            host, seen = every[odd[0]]
            ranks = f"rank{'s' * (len(odd) > 1)} {' '.join(map(str, odd[:8]))}"
            ranks += " ..." * (len(odd) > 8)
            here, there = seen.get(where, "nothing"), first.get(where, "nothing")
            raise PlanError(
                f"{where}: {ranks} on {host}: {here}; rank 0 on {first_host}: {there}; expected "
                f"{expected}"
            )


def all_gathered[T](value: T, group: dist.ProcessGroup) -> list[T]:
    """All-gather a picklable ``value`` over ``group``; return the values in rank order."""
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, value, group=group)
    return every


def gathered[T](value: T, group: dist.ProcessGroup) -> list[T] | None:
    """Gather a picklable ``value`` over ``group``; return all values on rank 0, else None."""
    every: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, every, group=group, group_dst=0)
    return every


def digest(*data: Buffer) -> bytes:
    """Return the SHA-256 digest, 32 bytes, of the concatenated ``data``."""
    hasher = hashlib.sha256()
    for one in data:
        hasher.update(one)
    return hasher.digest()
