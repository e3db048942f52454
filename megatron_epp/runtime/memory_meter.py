"""Bytes that a stage holds for its chunks: saved by autograd, and kept in the store."""

import math
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_epp.runtime.kv_store import StageStores, Store


class NoMeter:
    """Measures nothing and costs nothing."""

    peak_bytes = now = 0
    limit_bytes = math.inf

    def watch(self, store: Store | StageStores) -> AbstractContextManager:
        return nullcontext()

    def check(self):
        pass

    def op_peak(self) -> int:
        return 0

    def hold(self, tensor: Tensor) -> Any:
        """A token that counts ``tensor`` for as long as it lives."""
        return tensor

    def held(self, token: Any) -> Tensor:
        """The tensor that ``hold`` gave ``token`` for."""
        return token


class LimitReached(MemoryError):
    """A host's chunks hold more than the limit that was set: what a device of that size says."""


def out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory has run out, of a device or of the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def free_cached_memory():
    """Give back what the CUDA allocator keeps for later, so that other sizes fit."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Saved:
    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def has_no_storage(tensor: Tensor) -> bool:
    """Whether ``tensor`` is one of Transformer Engine's around its data and scales: a weight that
    is kept quantised. Nobody saves it for himself."""
    return hasattr(tensor, "prepare_for_saving")


class SavedBytesMeter:
    """Counts every storage that autograd saved once, as long as anything saved refers to it.

    For hosts without a GPU: the allocator of the C library tells nothing. Parameters are not
    counted, the store's buffers are, temporaries that autograd does not save are not.
    """

    def __init__(self, parameters: Iterable[Tensor], limit_bytes: float = math.inf):
        self.limit_bytes = limit_bytes
        self._ignored = {p.untyped_storage().data_ptr() for p in parameters}
        self._references: dict[int, int] = {}
        self._store: Store | StageStores | None = None
        self.saved_bytes = 0
        self.peak_bytes = 0
        self._op_peak = 0

    def watch(self, store: Store | StageStores) -> AbstractContextManager:
        """A context in which what autograd saves is counted, beside ``store``'s bytes."""
        self._store = store
        self.peak_bytes = self._op_peak = self.now
        return torch.autograd.graph.saved_tensors_hooks(self.hold, self.held)

    @property
    def now(self) -> int:
        """Bytes held."""
        return self.saved_bytes + (self._store.bytes if self._store is not None else 0)

    def check(self):
        """Raise :class:`LimitReached` where more was held since ``op_peak`` than is allowed.

        Not where it happens: an error raised while autograd saves a tensor leaks the graph.
        """
        if max(self._op_peak, self.now) > self.limit_bytes:
            raise LimitReached(
                f"{max(self._op_peak, self.now) / 2**20:.1f} MiB held, the limit is "
                f"{self.limit_bytes / 2**20:.1f}"
            )

    def op_peak(self) -> int:
        """The most bytes held since the last call."""
        peak = max(self._op_peak, self.now)
        self.peak_bytes = max(self.peak_bytes, peak)
        self._op_peak = self.now
        return peak

    def hold(self, tensor: Tensor) -> "_Saved | Tensor":
        """A token that counts ``tensor``'s storage for as long as it lives, if it has one."""
        if has_no_storage(tensor):
            return tensor
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        if where in self._ignored or where == 0:
            return tensor
        if self._store is not None and self._store.counts(where):
            return tensor  # a state that a slice begins with: the store's own bytes
        count = self._references.get(where, 0)
        self._references[where] = count + 1
        # Detached: an op that saves its own output would keep itself alive through it for ever, if
        # its backward never comes.
        saved = _Saved(tensor.detach())
        weakref.finalize(saved, self._freed, where, storage.nbytes())
        if count == 0:
            self.saved_bytes += storage.nbytes()
            self._op_peak = max(self._op_peak, self.now)
        return saved

    def _freed(self, where: int, nbytes: int):
        self._references[where] -= 1
        if self._references[where] == 0:
            del self._references[where]
            self.saved_bytes -= nbytes

    @staticmethod
    def held(saved: "_Saved | Tensor") -> Tensor:
        """The tensor that :meth:`hold` gave ``saved`` for."""
        return saved.tensor if isinstance(saved, _Saved) else saved


def active_bytes(figure: str) -> int:
    """Bytes of the CUDA allocator that are in use: "current", or their "peak" since it was reset.

    Blocks of tensors that are there, and of those that are gone but that a stream may still use: a
    message's is given back only when the messages behind it are done, too. torch.cuda's own
    functions know the former only, and flatten and sort about 110 figures to give one: half a
    millisecond of the host, where a small chunk's op takes five.
    """
    return torch.cuda.memory_stats_as_nested_dict()["active_bytes"]["all"][figure]


class AllocatorMeter:
    """The CUDA caching allocator's own figures, over what was in use when watching began.

    ``every_op``: each op's own peak, for records; the allocator's peaks are then reset with every
    op, and Megatron's report of them is of the last op. Else an op's figure is the most since
    watching began, and Megatron's report is of the whole iteration.
    """

    limit_bytes = math.inf  # the device's own

    def __init__(self, every_op: bool = False):
        self.every_op = every_op
        self.peak_bytes = 0
        self._base = 0

    def watch(self, store: Store | StageStores) -> AbstractContextManager:
        self._base = active_bytes("current")
        self.peak_bytes = 0
        torch.cuda.reset_peak_memory_stats()
        return nullcontext()

    @property
    def now(self) -> int:
        return active_bytes("current") - self._base

    def check(self):
        pass  # the allocator raises by itself

    def op_peak(self) -> int:
        peak = active_bytes("peak") - self._base
        if self.every_op:
            torch.cuda.reset_peak_memory_stats()
        self.peak_bytes = max(self.peak_bytes, peak)
        return peak

    def hold(self, tensor: Tensor) -> Tensor:
        return tensor  # the allocator counts

    def held(self, tensor: Tensor) -> Tensor:
        return tensor


Meter = NoMeter | SavedBytesMeter | AllocatorMeter
