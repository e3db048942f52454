"""torch.cuda and torch.distributed as the hosts of a ``World`` see them.

NCCL   a message or collective is a task of a stream of its communicator, of which there is one
       for every group, and in it for every two ranks that send, whichever way; it stands behind
       what was issued to the current stream, both ends run at once, a wait is the stream's, and
       memory that it uses is not handed out before. The first call of a communicator returns
       when all its ranks have called
gloo   messages of the host's memory, in their order on a link, behind nothing; a wait is the
       host's; and who lets go of a request has lost the message
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.mcore.patching import cpu_host
from tests.device.memory import CUDA, Device, Ref, allocate, memory_of, on_device
from tests.device.queues import HERE, Stream, Task, World

# ------------------------------------------------------------------ torch.cuda


class CudaEvent:
    def __init__(self, **options: Any):
        self.task: Task | None = None

    def record(self, stream: "CudaStream | None" = None) -> None:
        self.task = (stream or current_stream()).issue("event")

    def wait(self, stream: "CudaStream | None" = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        HERE.world.wait(self.task)

    def query(self) -> bool:
        return self.task is None or bool(self.task.done)

    def elapsed_time(self, other: "CudaEvent") -> float:
        """Milliseconds: a task takes one."""
        if self.task is None or other.task is None or not (self.task.done and other.task.done):
            raise RuntimeError("device not ready: an event that has not happened")
        return float(other.task.done - self.task.done)


class CudaStream:
    def __init__(self, stream: Stream | None = None, device: Any = None):
        world, rank = HERE.world, HERE.host.rank
        self.stream = stream or world.stream(rank, ("stream", len(world.streams)))

    def issue(self, name: str, *after: Task | None) -> Task:
        return HERE.world.issue(self.stream, name, None, after)

    def wait_event(self, event: CudaEvent) -> None:
        self.issue("wait", event.task)

    def wait_stream(self, other: "CudaStream") -> None:
        self.issue("wait", other.stream.last)

    def record_event(self, event: CudaEvent | None = None) -> CudaEvent:
        event = event or CudaEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        HERE.world.wait(self.stream.last)


def current_stream(device: Any = None) -> CudaStream:
    return CudaStream(HERE.host.current)


class StreamContext:
    """torch's: one that can be entered again."""

    def __init__(self, stream: CudaStream):
        self.stream, self.host = stream.stream, HERE.host
        self.before = self.host.current

    def __enter__(self) -> None:
        self.before, self.host.current = self.host.current, self.stream

    def __exit__(self, *error: Any) -> None:
        self.host.current = self.before


def whole_device(device: Any = None) -> None:
    """The host waits for all that it has issued."""
    world, rank = HERE.world, HERE.host.rank
    for stream in [one for one in world.streams.values() if one.rank == rank]:
        world.wait(stream.last)


# ------------------------------------------------------------------ torch.distributed


class Group:
    """``ranks`` of the world, as one of them sees it; ``lazy``: communicators are made when two or
    all first speak."""

    def __init__(self, name: str, ranks: Sequence[int], backend: str = "nccl", lazy: bool = False):
        self.name, self.ranks, self.backend, self.lazy = name, tuple(ranks), backend, lazy
        self._issued: Counter = Counter()
        self._initialised: set = set()

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(HERE.host.rank)

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self.backend)

    def number(self, what: Any) -> int:
        self._issued[what] += 1
        return self._issued[what]

    def communicator(self, ranks: Sequence[int]) -> None:
        key = ("communicator", self.name, *sorted(ranks))
        if self.lazy and key not in self._initialised:
            self._initialised.add(key)
            world = HERE.world
            world.wait(world.issue(None, str(key), None, (), key, len(ranks)))


class NcclWork:
    def __init__(self, task: Task):
        self.task = task

    def wait(self) -> bool:
        current_stream().issue("wait", self.task)
        return True

    def is_completed(self) -> bool:
        return bool(self.task.done)


class GlooWork(NcclWork):
    def wait(self) -> bool:
        HERE.world.wait(self.task)
        return True

    def __del__(self) -> None:
        self.task.lost = not self.task.done


def _carry(task: Task) -> None:
    ends = dict(task.parts.values())
    source, target = ends["source"], ends["target"]
    assert source.how[:2] == target.how[:2], f"{task.name}: {source.how} sent, {target.how} awaited"
    target.tensor().copy_(source.tensor())
    if task.lost:
        target.tensor().fill_(float("nan"))


def _message(tensor: Tensor, group: Group, source: int, target: int) -> NcclWork:
    """This rank's end of the next message of a link."""
    me = HERE.host.rank
    assert me in (source, target) and source != target, "a message of others"
    end = "source" if me == source else "target"
    gloo = group.backend == "gloo"
    if gloo:
        assert not on_device(tensor), "gloo carries what is in the host's memory"
        stream = HERE.world.stream(me, (group.name, source, target), of_host=True)
        if me == target:
            tensor.fill_(float("nan"))
    else:
        assert on_device(tensor), "NCCL carries what is on the device"
        group.communicator((source, target))
        pair = tuple(sorted((source, target)))
        stream = HERE.world.stream(me, (group.name, *pair))
    assert tensor.is_contiguous(), "a message is contiguous"
    count = group.number((source, target))
    key = ("message", group.name, source, target, count)
    name = f"message {count} {source}>{target} of {group.name}"
    HERE.world.free_memory()
    after = () if gloo else (HERE.host.current.last,)
    task = HERE.world.issue(stream, name, _carry, after, key, 2, part=(end, Ref(tensor)))
    memory = memory_of(tensor)
    if memory is not None:
        memory.users.append(task)
    return GlooWork(task) if gloo else NcclWork(task)


def isend(tensor: Tensor, group: Any = None, group_dst: int | None = None) -> NcclWork:
    return _message(tensor, group, HERE.host.rank, group.ranks[group_dst])


def irecv(tensor: Tensor, group: Any = None, group_src: int | None = None) -> NcclWork:
    return _message(tensor, group, group.ranks[group_src], HERE.host.rank)


def send(tensor: Tensor, group: Any = None, group_dst: int | None = None) -> None:
    isend(tensor, group, group_dst).wait()


def recv(tensor: Tensor, group: Any = None, group_src: int | None = None) -> None:
    irecv(tensor, group, group_src).wait()


def _collective(name: str, act: Callable, group: Group, asynchronous: bool, *tensors: Tensor):
    """``act``: of what every rank gave, by its place in the group."""
    group.communicator(group.ranks)
    world, host = HERE.world, HERE.host
    stream = world.stream(host.rank, (group.name, "all"))
    key = ("collective", group.name, group.number("all"))
    assert all(map(on_device, tensors)), "NCCL works on what is on the device"

    def run(task: Task) -> None:
        assert all(part[0] == name for part in task.parts.values()), "ranks ask for different ones"
        act([[ref.tensor() for ref in task.parts[rank][1]] for rank in group.ranks])

    world.free_memory()
    task = world.issue(
        stream, f"{name} {key[2]} of {group.name}", run, (host.current.last,), key, group.size(),
        part=(name, [Ref(tensor) for tensor in tensors]),
    )  # fmt: skip
    for tensor in tensors:
        memory_of(tensor).users.append(task)
    work = NcclWork(task)
    if asynchronous:
        return work
    work.wait()
    return None


def all_reduce(tensor: Tensor, group: Any = None, async_op=False):
    def act(parts: list) -> None:
        total = torch.stack([part[0] for part in parts]).sum(0)
        for part in parts:
            part[0].copy_(total)

    return _collective(f"all_reduce {tuple(tensor.shape)}", act, group, async_op, tensor)


def all_gather_into_tensor(into: Tensor, tensor: Tensor, group: Any = None, async_op=False):
    def act(parts: list) -> None:
        whole = torch.cat([part[1].reshape(-1) for part in parts])
        for part in parts:
            part[0].copy_(whole.view(part[0].shape))

    return _collective("all_gather", act, group, async_op, into, tensor)


def reduce_scatter_tensor(into: Tensor, tensor: Tensor, group: Any = None, async_op=False):
    def act(parts: list) -> None:
        total = torch.stack([part[1].reshape(-1) for part in parts]).sum(0)
        for part, mine in zip(parts, total.chunk(len(parts)), strict=True):
            part[0].copy_(mine.view(part[0].shape))

    return _collective("reduce_scatter", act, group, async_op, into, tensor)


def all_to_all_single(into: Tensor, tensor: Tensor, group: Any = None, async_op=False):
    def act(parts: list) -> None:
        for at, part in enumerate(parts):
            part[0].copy_(torch.cat([other[1].chunk(len(parts))[at] for other in parts]))

    return _collective("all_to_all", act, group, async_op, into, tensor)


# ------------------------------------------------------------------ in place


def _pin_memory(tensor: Tensor, *args: Any) -> Tensor:
    made = allocate(tensor, pinned=True)
    made.copy_(tensor)
    return made


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """C++ sees a tensor of the host in one of the device: a copy to the other is asked for here."""
    asked = kwargs.get("device", args[0] if args else None)
    if isinstance(asked, torch.device | str) and on_device(tensor) != _is_cuda(asked):
        asked, late = torch.device(asked), kwargs.get("non_blocking", False)
        dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
        return torch.ops.aten._to_copy(tensor, dtype=dtype, device=asked, non_blocking=late)
    if isinstance(asked, torch.device | str):
        kwargs.pop("device", None)
        args = args[1:] if args else ()
        if not args and not kwargs:
            return tensor
    return _plain_to(tensor, *args, **kwargs)


def _is_cuda(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


_COLLECTIVES = (
    isend, irecv, send, recv,
    all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single,
)  # fmt: skip
_CUDA = {
    "Stream": CudaStream,
    "Event": CudaEvent,
    "current_stream": current_stream,
    "stream": StreamContext,
    "synchronize": whole_device,
    "empty_cache": whole_device,
    "is_available": lambda: True,
    "current_device": lambda: 0,
    "_lazy_init": lambda: None,
}
_plain_to = torch._C.TensorBase.to
_plain_device = torch._C.TensorBase.device.__get__
_TENSOR = {
    "device": property(lambda tensor: CUDA if on_device(tensor) else _plain_device(tensor)),
    "is_cuda": property(on_device),
    "to": _to,
    "cpu": lambda tensor: _to(tensor, "cpu"),
    "pin_memory": _pin_memory,
}


def _torchs_own() -> dict[str, Any]:
    """Torch's own functions, where Megatron's host without a GPU (cpu_host) has others in front."""
    found = {name: getattr(torch, name) for name in cpu_host._FACTORIES}
    return {name: getattr(made, "__wrapped__", made) for name, made in found.items()}


@contextmanager
def in_place() -> Iterator[None]:
    """torch.cuda, torch.distributed and tensors are these for a while, for all threads."""
    own = _torchs_own()
    with (
        patch.multiple(torch, **own) if own else nullcontext(),
        patch.multiple(torch.cuda, **_CUDA),
        patch.multiple(torch.Tensor, create=True, **_TENSOR),
        patch.multiple(dist, **{one.__name__: one for one in _COLLECTIVES}),
    ):
        yield


def run_on(world: World, program: Callable[[int], Any]) -> list[Any]:
    """``program(rank)`` on every rank of ``world``, whose devices and links these are."""
    with in_place():
        return world.run(program, lambda: (Device(),))
