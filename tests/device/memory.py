"""Tensors of a device that have a place before they have values: what is done to them is a task.

    memory of the device   not a number when it is made, and again as soon as its tensor is gone:
                           from there on the stream that it was made on may hand it out again
    pinned memory          a copy from or to it is a task; it is handed out again behind the copies
    other host memory      the host waits for copies to it and from it

Everything lies in the host's memory in truth, and all tensors are torch's own for a CPU; those of a
device say that they are on ``cuda:0``. Views are made at once, values when the task runs.
"""

import weakref
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tests.device.queues import HERE, Stream, Task

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
# Ops for whose result a host waits.
_ASKING = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
)


class Memory:
    """``users``: tasks that its allocator knows to wait for; ``stream``: it was made on, None for
    pinned memory."""

    __slots__ = ("bytes", "stream", "users")

    def __init__(self, bytes_: Tensor, stream: Stream | None):
        self.bytes, self.stream = bytes_, stream
        self.users: list[Task] = []


class _Owner(numpy.ndarray):
    """What dies with the last tensor that the host holds, whatever tasks still know."""


_memories: dict[int, Memory] = {}  # by storage


def memory_of(tensor: Tensor) -> Memory | None:
    return _memories.get(tensor.untyped_storage()._cdata)


def on_device(tensor: Tensor) -> bool:
    memory = memory_of(tensor)
    return memory is not None and memory.stream is not None


class Ref:
    """A tensor as tasks know it: it does not keep the memory from being handed out again."""

    def __init__(self, tensor: Tensor):
        memory = memory_of(tensor)
        self.kept = tensor.detach() if memory is None else None
        self.bytes = None if memory is None else memory.bytes
        self.how = tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        if self.kept is not None:
            return self.kept
        dtype, size, stride, offset = self.how
        return self.bytes.view(dtype).as_strided(size, stride, offset)


def allocate(like: Tensor, pinned: bool = False) -> Tensor:
    """New memory for a tensor of this shape: no number in it."""
    count = 1 + sum((n - 1) * s for n, s in zip(like.size(), like.stride(), strict=True))
    nbytes = -(-max(count * like.itemsize, 1) // 16) * 16
    base = numpy.full(nbytes, 255, numpy.uint8)
    owner = base.view(_Owner)
    host = HERE.host
    memory = Memory(torch.from_numpy(base), None if pinned else host.current)
    made = torch.frombuffer(owner, dtype=like.dtype).as_strided(like.size(), like.stride())
    where = made.untyped_storage()._cdata
    _memories[where] = memory
    weakref.finalize(owner, _let_go, where, memory, HERE.world, host).atexit = False
    return made


def _let_go(where: int, memory: Memory, world: Any, host: Any) -> None:
    del _memories[where]

    def hand_out() -> None:
        """Where a task still uses it, the allocator hands it out to nobody yet."""
        if not all(task.done for task in memory.users):
            return
        if memory.stream is None:
            memory.bytes.fill_(255)
        else:
            world.issue(memory.stream, "memory handed out again", lambda _: memory.bytes.fill_(255))

    host.freed.append(hand_out)


def enqueue(name: str, act: Callable[[Any], object], **others: Any) -> Task:
    return HERE.world.issue(HERE.host.current, name, act, **others)


def _synchronize() -> None:
    HERE.world.free_memory()
    HERE.world.wait(HERE.host.current.last)


class Device(TorchDispatchMode):
    """Everything that a thread asks of torch, sorted by where it happens."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its import takes four seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        asked = kwargs.get("device")
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        here = any(map(on_device, tensors))
        there = asked is not None and asked.type == "cuda"
        pinned = bool(kwargs.pop("pin_memory", False))
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        if not here and not there:
            made = func(*args, **kwargs)
            if pinned:
                values, made = made, allocate(made, pinned=True)
                made.copy_(values)
            return made
        if func in (aten._to_copy.default, aten.copy_.default):
            return _copied(func, asked, args, kwargs)
        if asked is not None and not there:  # a host's tensor like one of the device
            made = torch.empty(args[0].size(), dtype=kwargs.get("dtype") or args[0].dtype)
            return allocate(made, pinned=True) if pinned else made
        if not here:  # made there, perhaps in the shape of a host's tensor
            return _put_off(func, [], args, kwargs)
        returns = [one.alias_info for one in func._schema.returns]
        if returns and all(info is not None and not info.is_write for info in returns):
            return func(*args, **kwargs)  # a view
        for x in tensors:
            assert on_device(x) or x.dim() == 0, f"{func}: tensors of the host and of the device"
        if func in _ASKING or _indexed_by_mask(func, args):
            _synchronize()
            return tree_map_only(Tensor, _filled, func(*args, **kwargs))
        return _put_off(func, tensors, args, kwargs)


def _indexed_by_mask(func: Any, args: Any) -> bool:
    return func is aten.index.Tensor and any(
        isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
    )


def _filled(values: Tensor) -> Tensor:
    made = allocate(values)
    made.copy_(values)
    return made


def _as_task_knows(tensor: Tensor) -> Ref:
    return Ref(tensor if on_device(tensor) else tensor.detach().clone())


def _put_off(func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
    writes = any(
        one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments
    )
    given = tree_map_only(Tensor, _as_task_knows, (args, kwargs))
    if writes:
        _enqueue_call(func, given, [])
        return _written(func, args, kwargs)
    # For the shapes of what it makes; its values are garbage, except where nothing goes in.
    shown = func(*args, **kwargs)
    leaves, how = tree_flatten(shown)
    made = [allocate(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    places = [Ref(one) for one in made if isinstance(one, Tensor)]
    if func.__name__.startswith(("empty", "new_empty")):
        return tree_unflatten(made, how)
    if not tensors:
        values = shown
        enqueue(str(func), lambda task: places[0].tensor().copy_(values))
    else:
        _enqueue_call(func, given, places)
    return tree_unflatten(made, how)


def _enqueue_call(func: Any, given: Any, places: list[Ref]) -> None:
    def act(task: Task) -> None:
        args, kwargs = tree_map_only(Ref, Ref.tensor, given)
        found = [x for x in tree_flatten(func(*args, **kwargs))[0] if isinstance(x, Tensor)]
        for place, values in zip(places, found[: len(places)], strict=True):
            place.tensor().copy_(values)

    enqueue(str(func), act)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """What an op that writes in place returns: the tensors that it was given for it."""
    made = []
    for one in func._schema.returns:
        assert one.alias_info is not None, f"{func} writes in place and makes something new"
        for at, argument in enumerate(func._schema.arguments):
            info = argument.alias_info
            if info is not None and info.before_set == one.alias_info.before_set:
                made.append(args[at] if at < len(args) else kwargs[argument.name])
    return made[0] if len(made) == 1 else tuple(made) or None


def _copied(func: Any, asked: torch.device | None, args: Any, kwargs: Any) -> Tensor:
    """Copies within the device, and between it and the host."""
    late = kwargs.get("non_blocking", False)
    if func is aten.copy_.default:
        target, source = args[:2]
        late = args[2] if len(args) > 2 else late
    else:
        source = args[0]
        dtype = kwargs.get("dtype") or source.dtype
        shape = torch.empty_like(source, dtype=dtype, device="meta")
        to_device = on_device(source) if asked is None else asked.type == "cuda"
        if to_device:
            target = allocate(shape)
        else:
            target = allocate(shape, pinned=True) if late else torch.empty_like(shape, device="cpu")
    both = on_device(source), on_device(target)
    memories = [m for m in map(memory_of, (source, target)) if m is not None and m.stream is None]
    pageable = not all(both) and not memories
    given, place = Ref(source), Ref(target)
    task = enqueue("copy", lambda task: place.tensor().copy_(given.tensor()))
    for memory in memories:
        memory.users.append(task)
    if pageable or (not all(both) and not late):
        HERE.world.wait(task)
    return target
