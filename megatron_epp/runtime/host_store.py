"""Tensors of offloaded layers in the host's memory: copied out while F runs, back while B or I
does.

    compute  F | layer 0 | layer 1 | layer 2 |       B | layer 2 | layer 1 | layer 0 |
    out                  [ 0 -> host ]
                                   [ 2 -> host ]
    back                                             [ 2 <- ]
                                                               [ 0 <-         ]

(layers 0 and 2 are offloaded, layer 1 is not). Two of them at most are on the device at a time, one
in use and one under way (ir.IN_FLIGHT), whatever the copies' speed: a layer begins when the
one before the last has left, and the next one comes back when the layer behind it begins its
backward. On a GPU each direction has a stream of its own and the host memory is pinned; streams
wait for events, the host for nothing. Without a GPU a copy is done when it is asked for; what is
held when is the same.

A layer's storages go whole and once, however many views of them were saved; what is not its own
(parameters, kept K and V, what all layers share) stays where it is.
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
from megatron_epp.runtime.memory_meter import Meter, NoMeter, has_no_storage

logger = logging.getLogger(__name__)

# Storages that are not worth a copy: borders of documents, states of a generator.
LEAST_BYTES = 512
# torch rounds pinned memory up to powers of two and keeps what was freed for later. So memory is
# asked for in such sizes: a layer wastes less than the smallest, and any block fits any layer.
LEAST_BLOCK, MOST_BLOCK = 2**16, 2**26

Pairs = Sequence[tuple[Tensor, Tensor]]  # (target, source), bytes


class _AtOnce:
    """Copies of a host without a GPU: done when the call returns."""

    pinned = False

    def out(self, pairs: Pairs) -> None:
        for target, source in pairs:
            target.copy_(source)

    back = out

    def wait(self, done: None) -> None:
        """It is done."""


class _Streams:
    """Copies on a stream for each direction; ``wait`` makes the compute stream wait."""

    pinned = True

    def __init__(self) -> None:
        self._out, self._back = torch.cuda.Stream(), torch.cuda.Stream()

    def out(self, pairs: Pairs) -> torch.cuda.Event:
        return self._copy(self._out, pairs)

    def back(self, pairs: Pairs) -> torch.cuda.Event:
        return self._copy(self._back, pairs)

    @staticmethod
    def _copy(stream: torch.cuda.Stream, pairs: Pairs) -> torch.cuda.Event:
        # Out: when the layer has computed it. Back: when nobody uses the memory any more that the
        # compute stream's allocator has just handed out.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait(self, done: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(done)


class _Storage:
    """One storage of a layer: ``held`` by the meter while it is on the device, ``blocks`` of the
    host's memory meanwhile. It lives as long as a saved view of it."""

    __slots__ = ("__weakref__", "blocks", "held", "nbytes")

    def __init__(self, held: Any, nbytes: int):
        self.held, self.nbytes = held, nbytes
        self.blocks: list[Tensor] = []


class _View:
    """Stand-in that autograd keeps for a tensor."""

    __slots__ = ("dtype", "offloaded", "offset", "size", "storage", "stride")

    def __init__(self, offloaded: "OffloadedLayer", storage: _Storage, tensor: Tensor):
        self.offloaded, self.storage, self.dtype = offloaded, storage, tensor.dtype
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()


class OffloadedLayer:
    """Tensors that one layer saved of one chunk: ``pack`` while it runs forward, ``unpack`` in
    backward.

    ``shared``: whether a tensor's storage is not the layer's own. ``before``: the chunk's offloaded
    that backward wants next.
    """

    def __init__(
        self,
        store: "HostStore",
        chunk: int,
        shared: Callable[[Tensor], bool],
        before: "OffloadedLayer | None",
    ):
        self._store, self.chunk, self._shared, self._before = store, chunk, shared, before
        self._storages: dict[int, _Storage] = {}  # by their address, while the layer runs
        self._away: list[weakref.ref[_Storage]] = []
        self._host_bytes = 0
        # What is copied, and when that is done: somebody must hold both ends until then.
        self._moving: list[_Storage] = []
        self._moved: Any = None
        self._sent = self._fetched = self._arrived = False

    # -------------------------------------------------------------- what autograd calls

    def pack(self, tensor: Tensor) -> Any:
        # Detached: an op that saves its own output would keep itself alive through it.
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
        if not isinstance(packed, _View):
            return self._store.meter.held(packed)
        self._arrive()
        flat = self._store.meter.held(packed.storage.held)
        return flat.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)

    # -------------------------------------------------------------- on its way

    def send(self) -> bool:
        """The layer has run: copy out what it saved. False where nothing leaves: there is nothing
        worth a copy, or the host has no room."""
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
        """Free on the device what has been copied out."""
        if self._moving:
            self._store.copies.wait(self._moved)
        for storage in self._moving:
            storage.held = None
        self._moving = []

    def fetch(self) -> None:
        """Begin to copy back what is still wanted."""
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
        """Backward is at this layer: it must be there, and the next one on its way."""
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
        """Give the host's memory back, when nothing is copied any more."""
        if self._moving:
            self._store.copies.wait(self._moved)
        for storage in (ref() for ref in self._away):
            if storage is not None:
                storage.blocks = []
        self._moving, self._away = [], []
        self._store.free(self, self._host_bytes)
        self._host_bytes = 0

    def _ends(self, storage: _Storage) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Its parts on the host, and the same parts on the device."""
        flat = self._store.meter.held(storage.held)
        return storage.blocks, flat.split([block.numel() for block in storage.blocks])


class _Taken:
    """Bytes of the host's memory that are taken, and the most since an iteration began."""

    def __init__(self, limit_bytes: float):
        self.limit_bytes = limit_bytes
        self.bytes = self.peak_bytes = 0


class HostStore:
    """The offloaded layers of an iteration's chunks on this rank, of one of its stages.

    limit_bytes   of the host's memory that may be taken; a layer for which there is no room stays
                  on the device, which is said once
    beside        the store of another stage of the rank: what both take counts together
    bytes, peak_bytes   of the host's memory that is taken, and the most since ``begin``
    """

    def __init__(
        self,
        device: torch.device,
        meter: Meter | None = None,
        parameters: Iterable[Tensor] = (),
        limit_bytes: float = math.inf,
        beside: "HostStore | None" = None,
    ):
        self.device = device
        self._taken: _Taken = _Taken(limit_bytes) if beside is None else beside._taken
        self.meter: Meter = NoMeter() if meter is None else meter
        self._parameters = {p.untyped_storage()._cdata for p in parameters}
        self._copies: Any = None
        # By chunk, in the order of its layers.
        self._offloaded: dict[int, list[OffloadedLayer]] = {}
        self._leaving: deque[OffloadedLayer] = deque()
        self._reported = False

    @property
    def limit_bytes(self) -> float:
        return self._taken.limit_bytes

    @property
    def bytes(self) -> int:
        return self._taken.bytes

    @property
    def peak_bytes(self) -> int:
        return self._taken.peak_bytes

    def __len__(self) -> int:
        return len(self._offloaded)

    @property
    def copies(self) -> Any:
        """Made when first asked for: a job that offloads nothing has no streams for it."""
        if self._copies is None:
            self._copies = _Streams() if self.device.type == "cuda" else _AtOnce()
        return self._copies

    def is_parameter(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._parameters

    def begin(self) -> None:
        """An iteration begins: ``peak_bytes`` is its own."""
        self._taken.peak_bytes = self._taken.bytes

    # -------------------------------------------------------------- F

    @contextmanager
    def layer(self, chunk: int, shared: Callable[[Tensor], bool]) -> Iterator[None]:
        """A context for the forward of one layer of ``chunk``: what autograd saves in it leaves the
        device when it ends."""
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
        """F is over: nothing of it is on its way out any more when the next op begins."""
        while self._leaving:
            self._leaving.popleft().leave()

    # -------------------------------------------------------------- B, I

    def prefetch(self, chunk: int) -> None:
        """B or I of ``chunk`` begins: the layer that it comes to first is on its way."""
        for offloaded in self._offloaded.get(chunk, ())[-1:]:
            offloaded.fetch()

    def clear(self) -> None:
        """Forget everything, as in an iteration that failed."""
        self.wait()
        for offloaded in [one for of_chunk in self._offloaded.values() for one in of_chunk]:
            offloaded.release()

    # -------------------------------------------------------------- the host's memory

    def allocate(self, nbytes: int) -> list[Tensor] | None:
        """Blocks of together at least ``nbytes``; None where there is no room for them."""
        sizes = list(_sizes(nbytes))
        taken = sum(sizes)
        if self.bytes + taken > self.limit_bytes:
            self._say_full(taken, f"{self.limit_bytes / 2**30:.4g} GiB may be taken")
            return None
        try:
            tensors = [
                torch.empty(size, dtype=torch.uint8, pin_memory=self.copies.pinned)
                for size in sizes
            ]
        except (MemoryError, RuntimeError) as error:
            self._say_full(taken, str(error).splitlines()[0])
            return None
        self._taken.bytes += taken
        self._taken.peak_bytes = max(self.peak_bytes, self.bytes)
        return tensors

    def free(self, offloaded: OffloadedLayer, nbytes: int) -> None:
        """``offloaded`` is on the device again."""
        self._taken.bytes -= nbytes
        of_chunk = self._offloaded[offloaded.chunk]
        of_chunk.remove(offloaded)
        if not of_chunk:
            del self._offloaded[offloaded.chunk]

    def _say_full(self, nbytes: int, why: str) -> None:
        if not self._reported:
            logger.warning(
                "no room on the host for %.1f MiB that a layer saved, %.1f MiB are taken (%s): it "
                "stays on the device; see --epp-host-memory-gib. Said once",
                nbytes / 2**20,
                self.bytes / 2**20,
                why,
            )
        self._reported = True


def _bytes_of(tensor: Tensor, nbytes: int) -> Tensor:
    """All bytes of the tensor's storage, [nbytes] uint8."""
    items, rest = divmod(nbytes, tensor.itemsize)
    assert not rest, "a storage holds whole numbers"
    return tensor.as_strided((items,), (1,), 0).view(torch.uint8)


def _sizes(nbytes: int) -> Iterator[int]:
    """Powers of two that together hold ``nbytes``, the largest first."""
    size = MOST_BLOCK
    while nbytes > 0:
        while size > LEAST_BLOCK and size > nbytes:
            size //= 2
        yield size
        nbytes -= size


def _assigned(blocks: Sequence[Tensor], storages: Sequence[_Storage]) -> Iterator[list[Tensor]]:
    """For every storage the parts of ``blocks`` that its bytes lie in, one behind the other."""
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
