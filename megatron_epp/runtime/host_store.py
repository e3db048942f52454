"""Offloaded activations in host memory: copied out during F, copied back during B or I.

    compute  F | layer 0 | layer 1 | layer 2 |       B | layer 2 | layer 1 | layer 0 |
    out                  [ 0 -> host ]
                                   [ 2 -> host ]
    back                                             [ 2 <- ]
                                                               [ 0 <-         ]

In this example layers 0 and 2 are offloaded and layer 1 is not. At most two offloaded layers are on
the device at a time, one in use and one in transfer (ir.IN_FLIGHT), however slow copies are. Let
n count offloaded layers. In forward, layer n starts after layer n - 2 has been copied out. In
backward, layer n - 1 is copied back while layer n computes. On a GPU, each direction has a stream,
and host memory is pinned; streams wait for events, and the host never waits. On CPU-only hosts,
copies are synchronous; every op holds the same bytes as on a GPU.

Each storage of a layer is copied once, even if several views of it were saved. Storages that are
not the layer's own (parameters, cached K/V, tensors shared by all layers) stay on the device.
"""

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_epp.ir import IN_FLIGHT
from megatron_epp.ir.errors import first_line
from megatron_epp.runtime.memory_meter import Meter, NoMeter, has_no_storage

logger = logging.getLogger(__name__)

# Smaller storages are not worth a copy: document boundaries, generator states.
LEAST_BYTES = 512
# torch rounds pinned memory up to powers of two and caches freed blocks. Requesting these sizes
# wastes less than the smallest block per layer, and any block can serve any layer.
LEAST_BLOCK, MOST_BLOCK = 2**16, 2**26

Pairs = Sequence[tuple[Tensor, Tensor]]  # (target, source), bytes


class _AtOnce:
    """Synchronous copies, for CPU-only hosts."""

    pinned = False

    def out(self, pairs: Pairs) -> None:
        for target, source in pairs:
            target.copy_(source)

    back = out

    def wait(self, done: None) -> None:
        """Return immediately, because the copies are complete."""


class _Streams:
    """Copies on one stream per direction; ``wait`` makes the compute stream wait."""

    pinned = True

    def __init__(self) -> None:
        self._out, self._back = torch.cuda.Stream(), torch.cuda.Stream()

    def out(self, pairs: Pairs) -> torch.cuda.Event:
        return self._copy(self._out, pairs)

    def back(self, pairs: Pairs) -> torch.cuda.Event:
        return self._copy(self._back, pairs)

    @staticmethod
    def _copy(stream: torch.cuda.Stream, pairs: Pairs) -> torch.cuda.Event:
        # Out: after the layer has computed the source. Back: after the last use of the memory that
        # the compute stream's allocator has just reused.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait(self, done: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(done)


class _Storage:
    """A storage of a layer; this object lives as long as autograd saves a view of the storage.

    ``held`` is the meter's token while the storage is on the device; ``blocks`` are its copy in
    host memory.
    """

    __slots__ = ("__weakref__", "blocks", "held", "nbytes")

    def __init__(self, held: Any, nbytes: int):
        self.held, self.nbytes = held, nbytes
        self.blocks: list[Tensor] = []


class _View:
    """View of a storage, which autograd saves in place of a tensor."""

    __slots__ = ("dtype", "offloaded", "offset", "size", "storage", "stride")

    def __init__(self, offloaded: "OffloadedLayer", storage: _Storage, tensor: Tensor):
        self.offloaded, self.storage, self.dtype = offloaded, storage, tensor.dtype
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()


class OffloadedLayer:
    """Tensors that one layer saved for one chunk.

    Args:
        store: the host store.
        chunk: number of the chunk.
        shared: function that returns whether a tensor's storage belongs to several layers.
        before: the chunk's preceding offloaded layer, whose tensors backward needs next after those
            of this layer; None if this layer is the first.
    """

    def __init__(
        self,
        store: "HostStore",
        chunk: int,
        shared: Callable[[Tensor], bool],
        before: "OffloadedLayer | None",
    ):
        self._store, self.chunk, self._shared, self._before = store, chunk, shared, before
        self._storages: dict[int, _Storage] = {}  # by address, during the layer's forward
        self._away: list[weakref.ref[_Storage]] = []
        self._host_bytes = 0
        # Storages in transfer, and when they are done; both ends must stay alive until then.
        self._moving: list[_Storage] = []
        self._moved: Any = None
        self._sent = self._fetched = self._arrived = False

    def pack(self, tensor: Tensor) -> Any:
        """Return a ``_View`` or a meter token, which autograd saves in place of ``tensor``."""
        # Detached: an op that saves its own output would otherwise keep itself alive through it.
        tensor = tensor.detach()
        if has_no_storage(tensor):
            return self._store.meter.hold(tensor)
        storage, store = tensor.untyped_storage(), self._store
        nbytes = storage.nbytes()
        if (
            tensor.device.type != store.device.type
            or nbytes < LEAST_BYTES
            or store.is_parameter(tensor)
            or self._shared(tensor)
        ):
            return store.meter.hold(tensor)
        copied = self._storages.get(storage._cdata)
        if copied is None:
            copied = _Storage(store.meter.hold(_bytes_of(tensor, nbytes)), nbytes)
            self._storages[storage._cdata] = copied
        return _View(self, copied, tensor)

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor of ``packed``; its storage is copied back first if necessary."""
        if not isinstance(packed, _View):
            return self._store.meter.held(packed)
        self._arrive()
        flat = self._store.meter.held(packed.storage.held)
        return flat.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)

    def send(self) -> bool:
        """Start the copies of the layer's saved tensors to the host, after the layer's forward.

        Returns:
            Whether copies were started. Nothing is copied if host memory is full, or if the layer
            saved no storage of at least ``LEAST_BYTES``.
        """
        storages, self._storages = list(self._storages.values()), {}
        blocks = self._store.allocate(sum(storage.nbytes for storage in storages))
        if not blocks:
            return False
        self._sent = True
        self._host_bytes = sum(block.numel() for block in blocks)
        for storage, parts in zip(storages, _assigned(blocks, storages), strict=True):
            storage.blocks = parts
        self._away = [weakref.ref(storage) for storage in storages]
        self._moving = storages
        self._moved = self._store.copies.out(
            [pair for storage in storages for pair in zip(*self._ends(storage), strict=True)]
        )
        return True

    def leave(self) -> None:
        """Wait for the copies and free the device memory."""
        if self._moving:
            self._store.copies.wait(self._moved)
        for storage in self._moving:
            storage.held = None
        self._moving = []

    def fetch(self) -> None:
        """Start to copy the storages that autograd still references back to the device."""
        if self._fetched:
            return
        assert not self._moving, "a layer comes back before it has left"
        self._fetched = True
        store = self._store
        self._moving = [storage for ref in self._away if (storage := ref()) is not None]
        for storage in self._moving:
            flat = torch.empty(storage.nbytes, dtype=torch.uint8, device=store.device)
            storage.held = store.meter.hold(flat)
        self._moved = store.copies.back(
            [pair[::-1] for s in self._moving for pair in zip(*self._ends(s), strict=True)]
        )

    def _arrive(self) -> None:
        """Wait until the layer is on the device; start to fetch the offloaded layer before it."""
        if self._arrived:
            return
        self._arrived = True
        if self._sent:
            self.fetch()
            self.release()
        before, self._before = self._before, None
        if before is not None:
            before.fetch()

    def release(self) -> None:
        """Wait for the copies and free the host memory."""
        if self._moving:
            self._store.copies.wait(self._moved)
        for storage in (ref() for ref in self._away):
            if storage is not None:
                storage.blocks = []
        self._moving, self._away = [], []
        self._store.free(self, self._host_bytes)
        self._host_bytes = 0

    def _ends(self, storage: _Storage) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Return a storage's host blocks, and the corresponding parts of its device memory."""
        flat = self._store.meter.held(storage.held)
        return storage.blocks, flat.split([block.numel() for block in storage.blocks])


class HostMemory:
    """Host memory of a rank for offloaded layers, which the stores of its stages share.

    Attributes:
        limit_bytes: limit of the memory in use, in bytes. A layer that does not fit stays on the
            device.
        bytes: memory in use, in bytes.
        peak_bytes: peak of the memory in use since an iteration began, in bytes.
    """

    def __init__(self, limit_bytes: float = math.inf):
        self.limit_bytes = limit_bytes
        self.bytes = self.peak_bytes = 0


class HostStore:
    """Offloaded layers of the chunks of one stage on this rank, for one iteration.

    Args:
        device: device of the layers.
        meter: meter of the bytes held on the device; None for none.
        parameters: tensors that are never offloaded.
        memory: host memory of the rank; None for unlimited memory of this stage alone. If it is
            full, a warning is logged the first time.
    """

    def __init__(
        self,
        device: torch.device,
        meter: Meter | None = None,
        parameters: Iterable[Tensor] = (),
        memory: HostMemory | None = None,
    ):
        self.device = device
        self.memory = HostMemory() if memory is None else memory
        self.meter: Meter = NoMeter() if meter is None else meter
        self._parameters = {p.untyped_storage()._cdata for p in parameters}
        self._copies: Any = None
        # By chunk, in the order of the layers.
        self._offloaded: dict[int, list[OffloadedLayer]] = {}
        self._leaving: deque[OffloadedLayer] = deque()
        self._reported = False

    def __len__(self) -> int:
        return len(self._offloaded)

    @property
    def copies(self) -> Any:
        """Copy engine, which is created at the first offload."""
        if self._copies is None:
            self._copies = _Streams() if self.device.type == "cuda" else _AtOnce()
        return self._copies

    def is_parameter(self, tensor: Tensor) -> bool:
        """Return whether the tensor's storage is that of a parameter."""
        return tensor.untyped_storage()._cdata in self._parameters

    def begin(self) -> None:
        """Reset the memory's peak at the start of an iteration."""
        self.memory.peak_bytes = self.memory.bytes

    @contextmanager
    def layer(self, chunk: int, shared: Callable[[Tensor], bool]) -> Iterator[None]:
        """Offload the tensors that autograd saves in the forward of one layer of ``chunk``.

        The forward runs in this context. At its end, the copies to the host start. If host memory
        is full, the layer stays on the device.

        Args:
            chunk: number of the chunk.
            shared: function that returns whether a tensor's storage belongs to several layers; such
                a storage stays on the device.
        """
        while len(self._leaving) >= IN_FLIGHT:
            self._leaving.popleft().leave()
        earlier = self._offloaded.get(chunk)
        offloaded = OffloadedLayer(self, chunk, shared, earlier[-1] if earlier else None)
        with torch.autograd.graph.saved_tensors_hooks(offloaded.pack, offloaded.unpack):
            yield
        with torch.no_grad():
            sent = offloaded.send()
        if sent:
            self._offloaded.setdefault(chunk, []).append(offloaded)
            self._leaving.append(offloaded)

    def wait(self) -> None:
        """Wait for the copies of all offloaded layers, and free their device memory."""
        while self._leaving:
            self._leaving.popleft().leave()

    def prefetch(self, chunk: int) -> None:
        """Start to copy back the chunk's last offloaded layer, which B or I needs first."""
        for offloaded in self._offloaded.get(chunk, ())[-1:]:
            offloaded.fetch()

    def clear(self) -> None:
        """Wait for all copies and free the host memory of all layers, after a failed iteration."""
        self.wait()
        for offloaded in [one for of_chunk in self._offloaded.values() for one in of_chunk]:
            offloaded.release()

    def allocate(self, nbytes: int) -> list[Tensor] | None:
        """Allocate uint8 blocks of at least ``nbytes`` in total; None if host memory is full.

        The first time that host memory is full, a warning is logged.
        """
        sizes = list(_sizes(nbytes))
        taken = sum(sizes)
        memory = self.memory
        if memory.bytes + taken > memory.limit_bytes:
            self._say_full(taken, f"{memory.limit_bytes / 2**30:.4g} GiB may be taken")
            return None
        try:
            tensors = [
                torch.empty(size, dtype=torch.uint8, pin_memory=self.copies.pinned)
                for size in sizes
            ]
        except (MemoryError, RuntimeError) as error:
            self._say_full(taken, first_line(error))
            return None
        memory.bytes += taken
        memory.peak_bytes = max(memory.peak_bytes, memory.bytes)
        return tensors

    def free(self, offloaded: OffloadedLayer, nbytes: int) -> None:
        """Subtract ``nbytes`` from the host memory in use, and remove ``offloaded``."""
        self.memory.bytes -= nbytes
        of_chunk = self._offloaded[offloaded.chunk]
        of_chunk.remove(offloaded)
        if not of_chunk:
            del self._offloaded[offloaded.chunk]

    def _say_full(self, nbytes: int, why: str) -> None:
        if not self._reported:
            logger.warning(
                "no memory on the host for %.1f MiB that a layer saved, %.1f MiB are taken (%s): "
                "it stays on the device; see --epp-host-memory-gib. Said once",
                nbytes / 2**20,
                self.memory.bytes / 2**20,
                why,
            )
        self._reported = True


def _bytes_of(tensor: Tensor, nbytes: int) -> Tensor:
    """Return all bytes of the tensor's storage: [nbytes] uint8."""
    items, rest = divmod(nbytes, tensor.itemsize)
    assert not rest, "a storage holds whole numbers"
    return tensor.as_strided((items,), (1,), 0).view(torch.uint8)


def _sizes(nbytes: int) -> Iterator[int]:
    """Yield powers of two that add up to at least ``nbytes``, the largest first."""
    size = MOST_BLOCK
    while nbytes > 0:
        while size > LEAST_BLOCK and size > nbytes:
            size //= 2
        yield size
        nbytes -= size


def _assigned(blocks: Sequence[Tensor], storages: Sequence[_Storage]) -> Iterator[list[Tensor]]:
    """Yield, for every storage, the consecutive parts of ``blocks`` that hold its bytes."""
    at, start = 0, 0
    for storage in storages:
        parts, missing = [], storage.nbytes
        while missing:
            stop = min(start + missing, blocks[at].numel())
            parts.append(blocks[at][start:stop])
            missing -= stop - start
            start = stop
            if start == blocks[at].numel():
                at, start = at + 1, 0
        yield parts
