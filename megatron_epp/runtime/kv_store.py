"""Keys and values of cut documents, and the gradients that later slices leave for earlier ones."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _Cached:
    """One layer's K/V of one document, and the gradients of its context's. C rows of the buffer or
    of the context, G heads, D head size, which K and V need not have in common. Of latent attention
    it may be latents and their rotated keys instead (layers/mla.py)."""

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
        """Where the memory of K's and V's buffers begins."""
        return {t.untyped_storage().data_ptr() for t in (self.key_CGD, self.value_CGD)}


class Store:
    """One preallocated buffer per (layer, cut document): no concatenation, no copy per slice.

    ``context_tokens[d]`` is how much of document ``d`` later slices attend to: all but its last
    slice. ``cached_tokens[d]`` are the buffer's rows, where kernels want the last slice's K and V
    behind its context's; else the context's. The buffer appears with the first slice's forward.
    Gradients of K and V add up in float32 (float64 for float64 tensors): a document of n slices
    adds n contributions, and the plain model rounds their sum once. Everything of a layer is freed
    when the first slice's backward has taken its gradients, or, in evaluation, by ``release``.

    Where documents continue others (``readers[d]``: how many spans see document ``d``), gradients
    of a context may come in any order of its branches, each of a part of it, and in evaluation all
    is freed when the last of them has seen it (``seen``). ``followers[d]``: how many of them begin
    right behind a border of it, and so see its state there.

    A layer that sees only a window keeps less, at places of its own (layers/attention/tails.py):
    ``rows`` of the buffer are then its, and ``boundaries[d]``, where the slices of document ``d``
    but the last end, say which.
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
        self._addresses: set[int] = set()  # of the buffers' memory
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
        """Keep the K and V of inputs [start, start + T); what is there already is not written.

        A recomputed forward produces the same K and V again: the buffer then stays as it is.
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
        """Views of the K and V of inputs [start, stop)."""
        kept = self._kept[layer, document]
        assert kept.filled >= stop, f"document {document}: {kept.filled} kept, {stop} wanted"
        return kept.key_CGD[start:stop], kept.value_CGD[start:stop]

    def __iter__(self) -> Iterator[tuple[int, int, Tensor]]:
        """(layer, document, K of what later slices attend to) of everything kept."""
        for (layer, document), kept in self._kept.items():
            yield layer, document, kept.key_CGD[: self.context_tokens[document]]

    def add_window_gradient(
        self, layer: int, document: int, start: int, key_grad_PGD: Tensor, value_grad_PGD: Tensor
    ):
        """Add what a slice contributes to the gradients of the buffer's rows from ``start`` on."""
        kept = self._kept[layer, document]
        if kept.key_grad_CGD is None:
            dtype = torch.promote_types(kept.key_CGD.dtype, torch.float32)
            kept.key_grad_CGD = torch.zeros_like(kept.key_CGD, dtype=dtype)
            kept.value_grad_CGD = torch.zeros_like(kept.value_CGD, dtype=dtype)
            self._grew(kept.key_grad_CGD.nbytes + kept.value_grad_CGD.nbytes)
        assert kept.value_grad_CGD is not None, "both gradients come together"
        kept.key_grad_CGD[start : start + len(key_grad_PGD)] += key_grad_PGD
        kept.value_grad_CGD[start : start + len(value_grad_PGD)] += value_grad_PGD

    def add_gradient(self, layer: int, document: int, key_grad_PGD: Tensor, value_grad_PGD: Tensor):
        """Add what a slice with P inputs before it contributes to their gradients."""
        kept, is_last_slice = self._kept[layer, document], False
        if kept.key_grad_CGD is None:
            is_last_slice = len(key_grad_PGD) == self.context_tokens[document]
            assert is_last_slice or document in self.readers, (
                "the last slice's backward comes first"
            )
        if not is_last_slice:
            self.add_window_gradient(layer, document, 0, key_grad_PGD, value_grad_PGD)
            return
        # The last slice's context is all of it: a copy, where a fill with zeros would pass over the
        # memory twice.
        dtype = torch.promote_types(kept.key_CGD.dtype, torch.float32)
        kept.key_grad_CGD = key_grad_PGD.to(dtype, copy=True)
        kept.value_grad_CGD = value_grad_PGD.to(dtype, copy=True)
        self._grew(kept.key_grad_CGD.nbytes + kept.value_grad_CGD.nbytes)

    def has_gradient(self, layer: int, document: int) -> bool:
        """Whether anybody has left any for the document in this layer."""
        return self._kept[layer, document].key_grad_CGD is not None

    def gradient(self, layer: int, document: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of what later slices left for the K and V of inputs [start, stop)."""
        kept = self._kept[layer, document]
        assert kept.key_grad_CGD is not None and kept.value_grad_CGD is not None
        return kept.key_grad_CGD[start:stop], kept.value_grad_CGD[start:stop]

    def holds(self, layer: int, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in a buffer of the layer's K and V."""
        where = tensor.untyped_storage()._cdata
        return any(
            where in (k.key_CGD.untyped_storage()._cdata, k.value_CGD.untyped_storage()._cdata)
            for (kept_layer, _), k in self._kept.items()
            if kept_layer == layer
        )

    def counts(self, address: int) -> bool:
        """Whether the memory that begins at ``address`` is a buffer's, and counted in ``bytes``."""
        return address in self._addresses

    def seen(self, layer: int, document: int, times: int):
        """In evaluation: another span has seen the document's K and V in this layer, which will be
        seen so many ``times``; the last one frees them."""
        left = self._unseen.pop((layer, document), times) - 1
        if left:
            self._unseen[layer, document] = left
        else:
            self.release(layer, document)

    def release(self, layer: int, document: int):
        """Free a layer's K/V of a document and their gradients."""
        kept = self._kept.pop((layer, document))
        self._addresses -= kept.addresses
        self.bytes -= kept.bytes

    def clear(self):
        """Free everything, as after an iteration that failed."""
        self._kept.clear()
        self._addresses.clear()
        self._unseen.clear()
        self.bytes = 0

    def _grew(self, bytes_: int):
        self.bytes += bytes_
        self.peak_bytes = max(self.peak_bytes, self.bytes)


class StageStores:
    """The stores of all stages of a rank, as one."""

    def __init__(self, stores: Sequence[Store]):
        self.stores = tuple(stores)

    def __len__(self) -> int:
        return sum(map(len, self.stores))

    @property
    def bytes(self) -> int:
        return sum(store.bytes for store in self.stores)

    def counts(self, address: int) -> bool:
        return any(store.counts(address) for store in self.stores)

    def clear(self):
        for store in self.stores:
            store.clear()
