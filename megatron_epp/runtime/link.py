"""Messages between pipeline ranks, with shapes and order from the plan instead of a handshake."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.ir import Message, Payload


def message_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device of the buffers with which ``group`` transfers tensors of ``device``.

    gloo sends and receives tensors in host memory only. It is therefore slow for GPU tensors, but
    allows several ranks to share a GPU, which NCCL refuses.
    """
    if device.type != "cpu" and group._get_backend(device).name() == "gloo":
        return torch.device("cpu")
    return device


def send_now(tensor: Tensor, group: dist.ProcessGroup, target: int):
    """Send ``tensor`` to rank ``target`` of the group; return when the tensor may be reused."""
    dist.send(tensor.to(message_device(group, tensor.device)), group=group, group_dst=target)


def receive_now(tensor: Tensor, group: dist.ProcessGroup, source: int):
    """Receive ``tensor`` from rank ``source`` of the group in place; block until it has arrived."""
    here = tensor.to(message_device(group, tensor.device))
    dist.recv(here, group=group, group_src=source)
    if here is not tensor:
        tensor.copy_(here)


def connect(
    groups: dict[Payload, dist.ProcessGroup],
    rank: int,
    size: int,
    device: torch.device,
    ranks: Sequence[int] | None = None,
    place: Sequence[int] = (),
):
    """Send one number over every link of a pipeline, in an order that cannot deadlock.

    NCCL creates the communicator of two ranks at their first message, when each of them waits for
    the other. If the first messages were receives posted ahead of time, two neighbours that wait
    for each other's gradients and activations would deadlock.

    Args:
        groups: process group of each payload (kind of message).
        rank: this rank in the pipeline.
        size: number of ranks of the pipeline.
        device: device of the messages.
        ranks: for each pipeline rank, its rank in the groups; None if both are equal.
        place: pipeline rank of every stage; () if stage i is on rank i.

    Raises:
        ValueError: if torch.distributed was initialised with a ``device_id``. All messages of a
            group then wait for one another, even on different links.
    """
    if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        raise ValueError(
            "torch.distributed was initialised with a device_id: all messages of a group then wait "
            "for one another, and pipelines that receive ahead stand still; initialise it without"
        )
    place = place or range(size)
    initialised: set[tuple[Payload, tuple[int, int]]] = set()
    for first, here in enumerate(place):
        for payload, group in groups.items():
            if first == len(place) - 1:
                if payload is not Payload.HEAD:
                    continue
                # H: from the last stage to the first, and from there from stage to stage
                ends = (here, place[0])
            else:
                ends = (here, place[first + 1])
                ends = ends[::-1] if payload is Payload.GRADIENT else ends
            if ends[0] == ends[1] or (payload, ends) in initialised:
                continue
            initialised.add((payload, ends))
            tensor = torch.zeros(1, device=device)
            source, target = ends if ranks is None else (ranks[ends[0]], ranks[ends[1]])
            if rank == ends[0]:
                send_now(tensor, group, target)
            elif rank == ends[1]:
                receive_now(tensor, group, source)


@dataclass(slots=True)
class _Posted:
    message: Message
    tensor: Tensor
    work: dist.Work


class Links:
    """Point-to-point messages of one rank for one iteration.

    Each payload, such as activations, has a process group, so that messages do not wait for those
    of another payload. Messages of a link (a pair of ranks) are posted, sent and received in the
    planned order, so they need no tag. A ``POST`` in the program starts each receive. If a group
    can transfer only host memory, messages are copied to and from the host.

    Args:
        groups: process group of each payload (kind of message).
        shape: function that returns the shape of a message.
        dtype: dtype of all messages.
        device: device of the tensors.
        ranks: for each pipeline rank, its rank in the groups; None if both are equal.
    """

    def __init__(
        self,
        groups: dict[Payload, dist.ProcessGroup],
        shape: Callable[[Message], Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        ranks: Sequence[int] | None = None,
    ):
        self.groups, self.shape, self.dtype, self.device = groups, shape, dtype, device
        self.ranks = ranks
        self._place = {name: message_device(group, device) for name, group in groups.items()}
        self.sent = self.received = 0
        self._sending: deque[tuple[Message, Tensor, dist.Work]] = deque()
        self._posted: dict[tuple[int, int], deque[_Posted]] = {}
        # Received, for the host; on a GPU the stream waits for them.
        self._arriving: deque[tuple[Message, dist.Work]] = deque()

    def post(self, message: Message):
        """Post the receive of ``message``, which must be the next message of its link."""
        tensor = torch.empty(
            tuple(self.shape(message)),
            dtype=self.dtype,
            device=self._place[message.payload],
            pin_memory=self._staged(message) and self.device.type == "cuda",
        )
        source = self._rank(message.link[0])
        work = dist.irecv(tensor, group=self.groups[message.payload], group_src=source)
        assert work is not None, "only a rank of the group receives"
        self._posted.setdefault(message.link, deque()).append(_Posted(message, tensor, work))

    def receive(self, message: Message) -> Tensor:
        """Return the tensor of ``message``, which must be the oldest posted message of its link.

        The host blocks until the tensor has arrived; with NCCL, only the CUDA stream waits.

        Raises:
            RuntimeError: if the message cannot be received.
        """
        posted = self._posted[message.link].popleft()
        assert posted.message == message, f"{message} expected, {posted.message} comes next"
        posted.work.wait()
        tensor = posted.tensor
        if self._staged(message):
            tensor = torch.empty_like(tensor, device=self.device, pin_memory=False)
            tensor.copy_(posted.tensor, non_blocking=True)
        elif self.device.type == "cuda":  # the stream waits, not the host
            self._arriving.append((message, posted.work))
        self._let_go()
        self.received += 1
        return tensor

    def send(self, message: Message, tensor: Tensor):
        """Start to send ``tensor``, and keep a reference until the message has been sent."""
        expected = tuple(self.shape(message))
        assert tuple(tensor.shape) == expected, f"{message}: {tuple(tensor.shape)}, not {expected}"
        tensor = tensor.contiguous()
        if self._staged(message):  # the copy makes the host wait for the tensor
            tensor = torch.empty_like(tensor, device=self._place[message.payload]).copy_(tensor)
        target = self._rank(message.link[1])
        work = dist.isend(tensor, group=self.groups[message.payload], group_dst=target)
        assert work is not None, "only a rank of the group sends"
        self._sending.append((message, tensor, work))
        self.sent += 1
        self._let_go()

    def _rank(self, place: int) -> int:
        """Return the rank in the groups of pipeline rank ``place``."""
        return place if self.ranks is None else self.ranks[place]

    def _staged(self, message: Message) -> bool:
        """Return whether ``message`` is copied through host memory."""
        return self._place[message.payload] != self.device

    def _let_go(self):
        """Free sent tensors and completed requests."""
        while self._sending and self._sending[0][2].is_completed():
            self._sending.popleft()
        while self._arriving and self._arriving[0][1].is_completed():
            self._arriving.popleft()

    def zeros(self, message: Message) -> Tensor:
        """Return zeros of the message's shape, to send after a failure."""
        shape = tuple(self.shape(message))
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def oldest_sending(self) -> Message | None:
        """Return the oldest message whose send is not complete; None if all are complete."""
        return self._sending[0][0] if self._sending else None

    def oldest_arriving(self) -> Message | None:
        """Return the oldest message that the device still waits for, or None; thread-safe."""
        arriving = tuple(self._arriving)
        return next((message for message, work in arriving if not work.is_completed()), None)

    def finish(self):
        """Wait until all messages have been sent."""
        while self._sending:
            self._sending[0][2].wait()
            self._sending.popleft()
        self._arriving.clear()
        assert not any(self._posted.values()), "a message was posted and never received"
