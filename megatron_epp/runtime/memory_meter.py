"""Meters of the bytes that a stage holds for its chunks: saved by autograd, or cached."""

import math
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_epp.runtime.kv_store import StageStores, Store


class NoMeter:
    """Meter that measures nothing."""

    peak_bytes = 0
    limit_bytes = math.inf

    @property
    def now(self) -> int:
        """Bytes held: 0."""
        return 0

    def watch(self, store: Store | StageStores) -> AbstractContextManager:
        """Return a context that does nothing."""
        return nullcontext()

    def check(self):
        """Do nothing, because there is no limit."""

    def op_peak(self) -> int:
        """Return 0 bytes."""
        return 0

    def hold(self, tensor: Tensor) -> Any:
        """Return ``tensor`` itself as the token for :meth:`held`."""
        return tensor

    def held(self, token: Any) -> Tensor:
        """Return the tensor of a token that :meth:`hold` returned."""
        return token


class LimitReached(MemoryError):
    """Error: chunks hold more bytes than the limit, which simulates a device's memory."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that a device or the host is out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def free_cached_memory():
    """Return unused blocks of the CUDA caching allocator to CUDA, to make space for other sizes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Saved:
    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def has_no_storage(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a Transformer Engine wrapper of data and scales.

    Weights that stay quantised are such wrappers; autograd does not save the wrapper itself.
    """
    return hasattr(tensor, "prepare_for_saving")


class SavedBytesMeter(NoMeter):
    """Meter that counts each storage saved by autograd once, while a saved tensor refers to it.

    It is for CPU-only hosts, where the C library's allocator reports nothing. Cache buffers count;
    parameters do not count, nor do temporaries that autograd does not save.

    Args:
        parameters: tensors that do not count.
        limit_bytes: limit that ``check`` enforces, in bytes.
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
        """Return a context in which tensors saved by autograd count, in addition to ``store``."""
        self._store = store
        self.peak_bytes = self._op_peak = self.now
        return torch.autograd.graph.saved_tensors_hooks(self.hold, self.held)

    @property
    def now(self) -> int:
        """Bytes held."""
        return self.saved_bytes + (self._store.bytes if self._store is not None else 0)

    def check(self):
        """Check that the bytes held since the last :meth:`op_peak` did not exceed the limit.

        Call it between ops: an error raised while autograd saves a tensor would leak the graph.

        Raises:
            LimitReached: if more bytes were held.
        """
        if max(self._op_peak, self.now) > self.limit_bytes:
            raise LimitReached(
                f"{max(self._op_peak, self.now) / 2**20:.1f} MiB held, the limit is "
                f"{self.limit_bytes / 2**20:.1f}"
            )

    def op_peak(self) -> int:
        """Return the peak of the bytes held since the last call, and begin a new peak."""
        peak = max(self._op_peak, self.now)
        self.peak_bytes = max(self.peak_bytes, peak)
        self._op_peak = self.now
        return peak

    def hold(self, tensor: Tensor) -> "_Saved | Tensor":
        """Return a token that counts the tensor's storage for as long as the token lives.

        If the storage does not count, as for a parameter, the token is the tensor itself.
        """
        if has_no_storage(tensor):
            return tensor
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        if where in self._ignored or where == 0:
            return tensor
        if self._store is not None and self._store.counts(where):
            return tensor  # a state that a slice begins with, which the store counts
        count = self._references.get(where, 0)
        self._references[where] = count + 1
        # Detached: an op that saves its own output, and whose backward never runs, would otherwise
        # keep itself alive.
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
        """Return the tensor of a token that :meth:`hold` returned."""
        return saved.tensor if isinstance(saved, _Saved) else saved


def active_bytes(figure: str) -> int:
    """Return the CUDA allocator's bytes in use; ``figure`` is "current", or "peak" since a reset.

    The bytes include blocks of freed tensors that a stream may still use, such as those of a
    message. torch.cuda's own functions exclude these blocks, and flatten about 110 statistics to
    return one value. That takes 0.5 ms of host time; an op of a small chunk takes 5 ms.
    """
    return torch.cuda.memory_stats_as_nested_dict()["active_bytes"]["all"][figure]


class AllocatorMeter(NoMeter):
    """Meter by the CUDA caching allocator, relative to the bytes in use when watching began.

    With ``every_op``, :meth:`op_peak` returns each op's peak, for records. The allocator's peak is
    then reset with every op, so Megatron's memory report covers the last op only. Otherwise
    :meth:`op_peak` returns the peak since watching began.
    """

    def __init__(self, every_op: bool = False):
        self.every_op = every_op
        self.peak_bytes = 0
        self._base = 0

    def watch(self, store: Store | StageStores) -> AbstractContextManager:
        """Reset the baseline and the peaks; return a context that does nothing."""
        self._base = active_bytes("current")
        self.peak_bytes = 0
        torch.cuda.reset_peak_memory_stats()
        return nullcontext()

    @property
    def now(self) -> int:
        """Bytes in use above the baseline."""
        return active_bytes("current") - self._base

    def op_peak(self) -> int:
        """Return the peak bytes above the baseline, in the last op (``every_op``) or all ops."""
        peak = active_bytes("peak") - self._base
        if self.every_op:
            torch.cuda.reset_peak_memory_stats()
        self.peak_bytes = max(self.peak_bytes, peak)
        return peak


Meter = NoMeter  # the class from which all meters are derived
