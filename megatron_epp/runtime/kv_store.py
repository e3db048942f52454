"""Cache of the K/V of sliced documents, and the sums of the K/V gradients from later slices."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _Cached:
    """K/V of one document in one layer, and their gradients.

    C is the number of rows of the buffer (gradients may have the context's rows only), G of heads,
    D the head size (which may differ between K and V). With an indexer, the key of all heads and
    the key of the indexer take the place of K and V.
    """

    key_CGD: Tensor
    value_CGD: Tensor
    filled: int = 0
    key_grad_CGD: Tensor | None = None
    value_grad_CGD: Tensor | None = None

    @property
    def bytes(self) -> int:
        tensors = (self.key_CGD, self.value_CGD, self.key_grad_CGD, self.value_grad_CGD)
        return sum(t.nbytes for t in tensors if t is not None)

    @property
    def addresses(self) -> set[int]:
        """Start addresses of the K and V buffers."""
        return {t.untyped_storage().data_ptr() for t in (self.key_CGD, self.value_CGD)}


class Store:
    """K/V cache with one preallocated buffer per layer and sliced document.

    A buffer is allocated in the first slice's forward. Every slice is written into it once, without
    concatenation. Gradients of K and V accumulate in float32 (float64 for float64 tensors), because
    the reference model rounds the sum over all slices only once. A buffer is freed when the first
    slice's backward has read its gradients, or by ``release`` in forward-only passes.

    If several documents continue one document, they add gradients of its K/V in any order. In
    forward-only passes, the K/V of a document are freed after the last span has attended to them. A
    sliding-window layer caches fewer rows, whose indices take the place of token positions
    (layers/attention/tails.py).

    Args:
        context_tokens: per document, the number of tokens that later slices attend to: all tokens
            before its last slice.
        cached_tokens: per document, the number of rows of the buffer. The last slice has rows, too,
            if kernels read its K/V from the buffer. Default: ``context_tokens``.
        boundaries: per document, the ends of all slices but the last; they select the rows of
            sliding-window layers. None if they are unknown.
        readers: for each document that other documents continue, the number of spans that attend to
            it; None if there are no such documents.
        followers: per document, the number of branches that begin at one of its slice boundaries
            and read the SSM state at that boundary; None without branches.
    """

    def __init__(
        self,
        context_tokens: Mapping[int, int],
        cached_tokens: Mapping[int, int] | None = None,
        boundaries: Mapping[int, tuple[int, ...]] | None = None,
        readers: Mapping[int, int] | None = None,
        followers: Mapping[int, int] | None = None,
    ):
        self.readers, self.followers = dict(readers or {}), dict(followers or {})
        self._unseen: dict[tuple[int, int], int] = {}
        self.boundaries = {} if boundaries is None else dict(boundaries)
        self.context_tokens = dict(context_tokens)
        self.cached_tokens = self.context_tokens if cached_tokens is None else dict(cached_tokens)
        self._kept: dict[tuple[int, int], _Cached] = {}
        self._addresses: set[int] = set()  # start addresses of the buffers
        self.bytes = 0
        self.peak_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def append(
        self,
        layer: int,
        document: int,
        start: int,
        key_TGD: Tensor,
        value_TGD: Tensor,
        rows: int | None = None,
    ):
        """Cache the K/V of tokens [start, start + T) of a document.

        Rows that are cached already are not written: a recomputed forward yields the same K/V.

        Args:
            layer: number of the layer.
            document: number of the document.
            start: position of the first token.
            key_TGD: keys [tokens, groups, head size].
            value_TGD: values [tokens, groups, head size].
            rows: number of rows of a new buffer; None for ``cached_tokens``.
        """
        kept = self._kept.get((layer, document))
        if kept is None:
            assert start == 0, f"layer {layer}: document {document} begins at {start}"
            kept_rows = self.cached_tokens[document] if rows is None else rows
            key, value = (t.new_empty(kept_rows, *t.shape[1:]) for t in (key_TGD, value_TGD))
            kept = _Cached(key, value)
            self._kept[layer, document] = kept
            self._addresses |= kept.addresses
            self._grew(kept.bytes)
        stop = start + key_TGD.shape[0]
        if kept.filled >= stop:
            return
        assert kept.filled == start, f"document {document}: {kept.filled} kept, {start} appended"
        kept.key_CGD[start:stop].copy_(key_TGD)
        kept.value_CGD[start:stop].copy_(value_TGD)
        kept.filled = stop

    def context(
        self, layer: int, document: int, stop: int, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return views [stop - start, groups, head size] of the cached K and V of a document.

        Args:
            layer: number of the layer.
            document: number of the document.
            stop: position after the last token.
            start: position of the first token.
        """
        kept = self._kept[layer, document]
        assert kept.filled >= stop, f"document {document}: {kept.filled} kept, {stop} wanted"
        return kept.key_CGD[start:stop], kept.value_CGD[start:stop]

    def __iter__(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (layer, document, K) of every buffer; K is the part that later slices attend to."""
        for (layer, document), kept in self._kept.items():
            yield layer, document, kept.key_CGD[: self.context_tokens[document]]

    def add_window_gradient(
        self, layer: int, document: int, start: int, key_grad_PGD: Tensor, value_grad_PGD: Tensor
    ):
        """Add gradients of P rows of the buffer to the accumulated gradients.

        Args:
            layer: number of the layer.
            document: number of the document.
            start: first row.
            key_grad_PGD: gradients of the keys [P, groups, head size].
            value_grad_PGD: gradients of the values [P, groups, head size].
        """
        kept = self._kept[layer, document]
        if kept.key_grad_CGD is None:
            dtype = torch.promote_types(kept.key_CGD.dtype, torch.float32)
            kept.key_grad_CGD = torch.zeros_like(kept.key_CGD, dtype=dtype)
            kept.value_grad_CGD = torch.zeros_like(kept.value_CGD, dtype=dtype)
            self._grew(kept.key_grad_CGD.nbytes + kept.value_grad_CGD.nbytes)
        assert kept.value_grad_CGD is not None, "both gradients come together"
        rows = slice(start, start + key_grad_PGD.shape[0])
        kept.key_grad_CGD[rows] += key_grad_PGD
        kept.value_grad_CGD[rows] += value_grad_PGD

    def add_gradient(self, layer: int, document: int, key_grad_PGD: Tensor, value_grad_PGD: Tensor):
        """Add the gradients, from a later slice, of the K and V of a document's first P tokens.

        The first call must be that of the last slice, with P equal to ``context_tokens[document]``.
        If other documents continue the document, calls may come in any order.

        Args:
            layer: number of the layer.
            document: number of the document.
            key_grad_PGD: gradients of the keys [P, groups, head size].
            value_grad_PGD: gradients of the values [P, groups, head size].
        """
        kept, is_last_slice = self._kept[layer, document], False
        if kept.key_grad_CGD is None:
            is_last_slice = len(key_grad_PGD) == self.context_tokens[document]
            assert is_last_slice or document in self.readers, (
                "the last slice's backward comes first"
            )
        if not is_last_slice:
            self.add_window_gradient(layer, document, 0, key_grad_PGD, value_grad_PGD)
            return
        # The last slice's context is the whole buffer: one copy, instead of a fill with zeros and
        # an addition.
        dtype = torch.promote_types(kept.key_CGD.dtype, torch.float32)
        kept.key_grad_CGD = key_grad_PGD.to(dtype, copy=True)
        kept.value_grad_CGD = value_grad_PGD.to(dtype, copy=True)
        self._grew(kept.key_grad_CGD.nbytes + kept.value_grad_CGD.nbytes)

    def has_gradient(self, layer: int, document: int) -> bool:
        """Return whether any later slice has added gradients for the document in this layer."""
        return self._kept[layer, document].key_grad_CGD is not None

    def gradient(self, layer: int, document: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return views of the accumulated gradients of the K and V of tokens [start, stop).

        Each has the shape [stop - start, groups, head size].

        Args:
            layer: number of the layer.
            document: number of the document.
            start: position of the first token.
            stop: position after the last token.
        """
        kept = self._kept[layer, document]
        assert kept.key_grad_CGD is not None and kept.value_grad_CGD is not None
        return kept.key_grad_CGD[start:stop], kept.value_grad_CGD[start:stop]

    def holds(self, layer: int, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is in one of the layer's buffers."""
        where = tensor.untyped_storage()._cdata
        return any(
            where in (k.key_CGD.untyped_storage()._cdata, k.value_CGD.untyped_storage()._cdata)
            for (kept_layer, _), k in self._kept.items()
            if kept_layer == layer
        )

    def counts(self, address: int) -> bool:
        """Return whether ``address`` is the start of a buffer that :attr:`bytes` counts."""
        return address in self._addresses

    def seen(self, layer: int, document: int, times: int):
        """Count one read of a layer's K/V of a document in a forward-only pass.

        After ``times`` reads, the buffers are freed.
        """
        left = self._unseen.pop((layer, document), times) - 1
        if left:
            self._unseen[layer, document] = left
        else:
            self.release(layer, document)

    def release(self, layer: int, document: int):
        """Free the K/V buffers of a document in a layer, and their gradients."""
        kept = self._kept.pop((layer, document))
        self._addresses -= kept.addresses
        self.bytes -= kept.bytes

    def clear(self):
        """Free everything, after a failed iteration."""
        self._kept.clear()
        self._addresses.clear()
        self._unseen.clear()
        self.bytes = 0

    def _grew(self, bytes_: int):
        self.bytes += bytes_
        self.peak_bytes = max(self.peak_bytes, self.bytes)


class StageStores:
    """K/V caches of all stages of a rank, to count and free as if they were one :class:`Store`."""

    def __init__(self, stores: Sequence[Store]):
        self.stores = tuple(stores)

    def __len__(self) -> int:
        return sum(map(len, self.stores))

    @property
    def bytes(self) -> int:
        """Bytes of all caches."""
        return sum(store.bytes for store in self.stores)

    def counts(self, address: int) -> bool:
        """Return whether ``address`` is the start of a buffer of any cache."""
        return any(store.counts(address) for store in self.stores)

    def clear(self):
        """Free everything, after a failed iteration."""
        for store in self.stores:
            store.clear()
