"""Messages between ranks of a pipeline: planned shapes, planned order, no handshake."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.ir import Message, Payload


def message_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where a tensor of ``device`` must lie to go over ``group``.

    gloo carries what is in the host's memory. It is slow for GPUs, and what lets several ranks
    share one: NCCL wants a GPU for each.
    """
    if device.type != "cpu" and group._get_backend(device).name() == "gloo":
        return torch.device("cpu")
    return device


def send_now(tensor: Tensor, group: dist.ProcessGroup, target: int):
    """Send to rank ``target`` of the group; returns when ``tensor`` may be used again."""
    dist.send(tensor.to(message_device(group, tensor.device)), group=group, group_dst=target)


def receive_now(tensor: Tensor, group: dist.ProcessGroup, source: int):
    """Receive into ``tensor`` from rank ``source`` of the group."""
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
    """Send one number over every link of a pipeline of ``size`` ranks, of which this is number
    ``rank``, in an order in which nobody waits in vain.

    ``ranks``: theirs in the groups; None where they hold this pipeline alone. ``place``: the rank
    of every stage; none where stage i lies on rank i.

    NCCL makes a communicator for two ranks when they first speak, and both wait in there for each
    other. If they first spoke where receives are posted early, a rank that waits for the next
    one's gradients and the next one, waiting for its activations, would never meet. ValueError:
    groups in which messages of one link would wait for those of another.
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
                ends = (here, place[0])  # of H: from the last stage to the first, and down
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
    """One rank's ends of its links for one iteration.

    Forward and backward traffic have a group each, so that neither waits behind the other.
    Messages of a link are posted, sent and received in one planned order, so they need no tag;
    every receive is posted with the shape that the plan says. When is the program's business.
    Where a group carries only what the host holds, its messages are copied there and back.
    """

    def __init__(
        self,
        groups: dict[Payload, dist.ProcessGroup],
        shape: Callable[[Message], Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        ranks: Sequence[int] | None = None,
    ):
        """``ranks``: the pipeline's in the groups; None where they hold this pipeline alone."""
        self.groups, self.shape, self.dtype, self.device = groups, shape, dtype, device
        self.ranks = ranks
        self._place = {name: message_device(group, device) for name, group in groups.items()}
        self.sent = self.received = 0
        self._sending: deque[tuple[Message, Tensor, dist.Work]] = deque()
        self._posted: dict[tuple[int, int], deque[_Posted]] = {}
        # Received, as far as the host knows; on a GPU it is the stream that waits for them.
        self._arriving: deque[tuple[Message, dist.Work]] = deque()

    def post(self, message: Message):
        """Take ``message`` in as soon as it comes; the next of its link."""
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
        """The tensor of ``message``, the first of those posted; waits until it is here."""
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
        """Hand ``tensor`` over; it stays alive until its message has left."""
        expected = tuple(self.shape(message))
        assert tuple(tensor.shape) == expected, f"{message}: {tuple(tensor.shape)}, not {expected}"
        tensor = tensor.contiguous()
        if self._staged(message):  # the host waits for what makes it, and for the copy
            tensor = torch.empty_like(tensor, device=self._place[message.payload]).copy_(tensor)
        target = self._rank(message.link[1])
        work = dist.isend(tensor, group=self.groups[message.payload], group_dst=target)
        assert work is not None, "only a rank of the group sends"
        self._sending.append((message, tensor, work))
        self.sent += 1
        self._let_go()

    def _rank(self, place: int) -> int:
        """The rank in the groups at ``place`` of the pipeline."""
        return place if self.ranks is None else self.ranks[place]

    def _staged(self, message: Message) -> bool:
        """Whether ``message`` goes through the host's memory."""
        return self._place[message.payload] != self.device

    def _let_go(self):
        """Free the tensors that have left, and the requests of those that are here."""
        while self._sending and self._sending[0][2].is_completed():
            self._sending.popleft()
        while self._arriving and self._arriving[0][1].is_completed():
            self._arriving.popleft()

    def zeros(self, message: Message) -> Tensor:
        """A stand-in for a tensor that could not be made."""
        shape = tuple(self.shape(message))
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def oldest_sending(self) -> Message | None:
        return self._sending[0][0] if self._sending else None

    def oldest_arriving(self) -> Message | None:
        """The message that the device waits for though the host went on. Any thread may ask."""
        arriving = tuple(self._arriving)
        return next((message for message, work in arriving if not work.is_completed()), None)

    def finish(self):
        """Wait until everything sent has left."""
        while self._sending:
            self._sending[0][2].wait()
            self._sending.popleft()
        self._arriving.clear()
        assert not any(self._posted.values()), "a message was posted and never received"
