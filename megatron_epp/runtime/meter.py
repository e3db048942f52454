"""Bytes that a stage holds for its chunks: saved by autograd, and kept in the store."""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megatron_epp.runtime.store import Store


class NoMeter:
    """Measures nothing and costs nothing."""

    peak_bytes = 0

    def watch(self, store: Store) -> AbstractContextManager:
        return nullcontext()

    def op_peak(self) -> int:
        return 0


class _Saved:
    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class SavedBytesMeter:
    """Counts every storage that autograd saved once, as long as anything saved refers to it.

    For hosts without a GPU: the allocator of the C library tells nothing. Parameters are not
    counted, the store's buffers are, temporaries that autograd does not save are not.
    """

    def __init__(self, parameters: Iterable[Tensor]):
        self._ignored = {p.untyped_storage().data_ptr() for p in parameters}
        self._references: dict[int, int] = {}
        self._store: Store | None = None
        self.saved_bytes = 0
        self.peak_bytes = 0
        self._op_peak = 0

    def watch(self, store: Store) -> AbstractContextManager:
        """A context in which what autograd saves is counted, beside ``store``'s bytes."""
        self._store = store
        self.peak_bytes = self._op_peak = self.now
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def now(self) -> int:
        return self.saved_bytes + (self._store.bytes if self._store is not None else 0)

    def op_peak(self) -> int:
        """The most bytes held since the last call."""
        peak = max(self._op_peak, self.now)
        self.peak_bytes = max(self.peak_bytes, peak)
        self._op_peak = self.now
        return peak

    def _pack(self, tensor: Tensor) -> "_Saved | Tensor":
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        if where in self._ignored or where == 0:
            return tensor
        count = self._references.get(where, 0)
        self._references[where] = count + 1
        if count == 0:
            self.saved_bytes += storage.nbytes()
            self._op_peak = max(self._op_peak, self.now)
        saved = _Saved(tensor)
        weakref.finalize(saved, self._freed, where, storage.nbytes())
        return saved

    def _freed(self, where: int, nbytes: int):
        self._references[where] -= 1
        if self._references[where] == 0:
            del self._references[where]
            self.saved_bytes -= nbytes

    @staticmethod
    def _unpack(saved: "_Saved | Tensor") -> Tensor:
        return saved.tensor if isinstance(saved, _Saved) else saved


class AllocatorMeter:
    """The CUDA caching allocator's own figures, over what was allocated when watching began."""

    def __init__(self):
        self.peak_bytes = 0
        self._base = 0

    def watch(self, store: Store) -> AbstractContextManager:
        self._base = torch.cuda.memory_allocated()
        self.peak_bytes = 0
        torch.cuda.reset_peak_memory_stats()
        return nullcontext()

    def op_peak(self) -> int:
        peak = torch.cuda.max_memory_allocated() - self._base
        torch.cuda.reset_peak_memory_stats()
        self.peak_bytes = max(self.peak_bytes, peak)
        return peak


Meter = NoMeter | SavedBytesMeter | AllocatorMeter
MakeMeter = Callable[[], Meter]
