"""Collectives on the host after which all ranks have the same plan, or all ranks fail."""

import hashlib
import socket
import struct
from collections.abc import Buffer, Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.ir import PlanError

_FAILED = 1


def broadcast_text(
    text: str | None, error: str | None, group: dist.ProcessGroup, source: int = 0
) -> str:
    """Broadcast ``text``, or ``error``, from rank ``source`` of a gloo group.

    Issues two broadcasts on the host: a header of 16 bytes, then the text.

    Args:
        text: text that ``source`` sends; ignored on other ranks.
        error: error message that ``source`` sends instead of ``text``; ignored on other ranks.
        group: a gloo group.
        source: rank in the group that sends.

    Returns:
        The text of ``source``.

    Raises:
        PlanError: on every rank, if ``source`` sends an error.
    """
    payload = (error if error is not None else text or "").encode()
    header = torch.zeros(16, dtype=torch.uint8)
    if group.rank() == source:
        header = torch.tensor(
            list(struct.pack("<qq", 0 if error is None else _FAILED, len(payload))),
            dtype=torch.uint8,
        )
    dist.broadcast(header, group=group, group_src=source)
    failed, size = struct.unpack("<qq", bytes(header.tolist()))
    body = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)
    if group.rank() != source:
        body = torch.empty(max(size, 1), dtype=torch.uint8)
    dist.broadcast(body, group=group, group_src=source)
    received = body.numpy().tobytes()[:size].decode()
    if failed:
        raise PlanError(received)
    return received


def broadcast_result(make: Callable[[], str | None], group: dist.ProcessGroup) -> str:
    """Call ``make`` on rank 0 of ``group``, and broadcast the text that it returns. Collective.

    Raises:
        PlanError: on all ranks, if ``make`` raises a ValueError.
    """
    text = error = None
    if group.rank() == 0:
        try:
            text = make()
        except ValueError as refusal:
            error = str(refusal)
    return broadcast_text(text, error, group)


def agree(
    text: str,
    what: str,
    group: dist.ProcessGroup,
    expected: str = "the same plan everywhere (same --epp-plan file, same lengths, same flags on "
    "every node)",
) -> None:
    """Compare digests of ``text`` over all ranks of ``group``. Collective.

    The message size does not depend on the number of ranks, unless texts differ.

    Args:
        text: the text of this rank.
        what: name of the text in the error message.
        group: a CPU group.
        expected: the error message's text after "expected".

    Raises:
        PlanError: on every rank, if two ranks hold different texts.
    """
    bounds = digest_bounds(text)
    if not same_digests(largest(bounds, group)):
        _raise_difference(text, what, group, expected)


def largest(values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """All-reduce ``values`` to their element-wise maximum over a CPU ``group``. Collective."""
    every = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(every, dist.ReduceOp.MAX, group=group)
    return every.tolist()


def digest_bounds(text: str) -> tuple[float, ...]:
    """Return two 32-bit pieces of the digest of ``text``, and then the negatives of both.

    If ranks all-reduce these numbers by maximum, :func:`same_digests` can compare all texts.
    """
    pieces = [float(piece) for piece in struct.unpack("<2I", digest(text.encode())[:8])]
    return (*pieces, *(-piece for piece in pieces))


DIGEST_NUMBERS = 4  # length of digest_bounds; small, because it is reduced in every iteration


def same_digests(bounds: Sequence[float]) -> bool:
    """Return whether all ranks' texts are equal, given the maxima of their digest bounds."""
    half = DIGEST_NUMBERS // 2
    return all(most == -least for most, least in zip(bounds[:half], bounds[half:], strict=True))


def _raise_difference(text: str, what: str, group: dist.ProcessGroup, expected: str) -> None:
    digests = [row[0].hex() for row in gather([digest(text.encode())], group)]
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        raise PlanError(
            f"{what}: ranks {' '.join(map(str, odd))} hold digest {digests[odd[0]][:12]}, rank 0 "
            f"holds {digests[0][:12]}; expected {expected}"
        )


def require_same(facts: Mapping[str, str], group: dist.ProcessGroup, expected: str) -> None:
    """All-gather and compare the ``facts`` that ranks of ``group`` see. Collective, on the host.

    Args:
        facts: for each flag or folder, a text that describes its state on this rank.
        group: a CPU group.
        expected: the error message's text after "expected".

    Raises:
        ValueError: on every rank, if two ranks see different facts.
    """
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, (socket.gethostname(), dict(facts)), group=group)
    first_host, first = every[0]
    for where in dict.fromkeys(key for _, seen in every for key in seen):
        odd = [n for n, (_, seen) in enumerate(every) if seen.get(where) != first.get(where)]
        if odd:
            host, seen = every[odd[0]]
            ranks = f"rank{'s' * (len(odd) > 1)} {' '.join(map(str, odd[:8]))}"
            ranks += " ..." * (len(odd) > 8)
            here, there = seen.get(where, "nothing"), first.get(where, "nothing")
            raise ValueError(
                f"{where}: {ranks} on {host}: {here}; rank 0 on {first_host}: {there}; expected "
                f"{expected}"
            )


def digest(*data: Buffer) -> bytes:
    """Return the SHA-256 digest, 32 bytes, of the concatenated ``data``."""
    hasher = hashlib.sha256()
    for one in data:
        hasher.update(one)
    return hasher.digest()


def gather(digests: Sequence[bytes], group: dist.ProcessGroup) -> list[list[bytes]]:
    """All-gather digests over ``group``, and return them: [ranks][digests]. Collective.

    Every rank passes the same number of digests, at least one.
    """
    local = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
    every = torch.empty(group.size() * local.numel(), dtype=torch.uint8)
    dist.all_gather_into_tensor(every, local, group=group)
    rows = every.view(group.size(), len(digests), -1).numpy()
    return [[one.tobytes() for one in row] for row in rows]
