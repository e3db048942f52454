"""Messages between neighbouring stages: planned shapes, planned order, no handshake."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.ir import Kind, Message, Payload, Program, Transfer

# Receives posted ahead on each link: one being filled while the last one is computed on.
POSTED_AHEAD = 2


def connect(
    groups: dict[Payload, dist.ProcessGroup], stage: int, stages: int, device: torch.device
):
    """Send one number over every link of the pipeline, in an order in which nobody waits in vain.

    NCCL makes a communicator for two ranks when they first speak, and both wait in there for each
    other. If they first spoke where receives are posted early, a stage that waits for the next
    one's gradients and the next one, waiting for its activations, would never meet. ValueError:
    groups in which messages of one link would wait for those of another.
    """
    if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        raise ValueError(
            "torch.distributed was initialised with a device_id: all messages of a group then wait "
            "for one another, and pipelines that receive ahead stand still; initialise it without"
        )
    for first in range(stages - 1):
        for payload, group in groups.items():
            ends = (first, first + 1) if payload is Payload.ACTIVATION else (first + 1, first)
            tensor = torch.zeros(1, device=device)
            if stage == ends[0]:
                dist.send(tensor, group=group, group_dst=ends[1])
            elif stage == ends[1]:
                dist.recv(tensor, group=group, group_src=ends[0])


@dataclass(slots=True)
class _Posted:
    message: Message
    tensor: Tensor
    work: dist.Work


class Links:
    """One stage's ends of its links for one iteration.

    Forward and backward traffic have a pipeline-wide group each, so that neither waits behind
    the other. Messages of a link are sent and received in one planned order, so they need no
    tag; every receive is posted with the shape that the plan says, ``POSTED_AHEAD`` at a time.
    """

    def __init__(
        self,
        program: Program,
        groups: dict[Payload, dist.ProcessGroup],
        shape: Callable[[int], Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.groups, self.shape, self.dtype, self.device = groups, shape, dtype, device
        self.sent = self.received = 0
        self._sending: deque[tuple[Message, Tensor, dist.Work]] = deque()
        self._coming: dict[tuple[int, int], deque[Message]] = {}
        self._posted: dict[tuple[int, int], deque[_Posted]] = {}
        for op in program:
            if isinstance(op, Transfer) and op.kind is Kind.RECEIVE:
                self._coming.setdefault(op.message.link, deque()).append(op.message)
        for link in self._coming:
            self._posted[link] = deque()
            for _ in range(POSTED_AHEAD):
                self._post(link)

    def _post(self, link: tuple[int, int]):
        if self._coming[link]:
            message = self._coming[link].popleft()
            tensor = torch.empty(
                tuple(self.shape(message.chunk)), dtype=self.dtype, device=self.device
            )
            group = self.groups[message.payload]
            work = dist.irecv(tensor, group=group, group_src=message.source)
            self._posted[link].append(_Posted(message, tensor, work))

    def receive(self, message: Message) -> Tensor:
        """The tensor of ``message``, which is the next of its link; waits until it is here."""
        posted = self._posted[message.link].popleft()
        assert posted.message == message, f"{message} expected, {posted.message} comes next"
        posted.work.wait()  # on a GPU the stream waits, not the host
        self._let_go()
        self._post(message.link)
        self.received += 1
        return posted.tensor

    def send(self, message: Message, tensor: Tensor):
        """Hand ``tensor`` over; it stays alive until its message has left."""
        expected = tuple(self.shape(message.chunk))
        assert tuple(tensor.shape) == expected, f"{message}: {tuple(tensor.shape)}, not {expected}"
        tensor = tensor.contiguous()
        group = self.groups[message.payload]
        work = dist.isend(tensor, group=group, group_dst=message.target)
        self._sending.append((message, tensor, work))
        self.sent += 1
        self._let_go()

    def _let_go(self):
        """Of what has left."""
        while self._sending and self._sending[0][2].is_completed():
            self._sending.popleft()

    def zeros(self, message: Message) -> Tensor:
        """What stands in for a tensor that could not be made."""
        shape = tuple(self.shape(message.chunk))
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def oldest_sending(self) -> Message | None:
        return self._sending[0][0] if self._sending else None

    def finish(self):
        """Wait until everything sent has left."""
        while self._sending:
            self._sending[0][2].wait()
            self._sending.popleft()
        assert not any(self._coming.values()) and not any(self._posted.values())
