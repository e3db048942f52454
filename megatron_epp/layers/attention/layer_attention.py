"""Attention as the layers of a chunk call it, and the heads of a call of its kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.recompute.outputs import RecomputeHandle


class Attention(Protocol):
    """Attention of one layer of a chunk. q [T, H, D], k and v [T, G, D] of all its rows; gives the
    output [T, H, D] and, with ``drop``, the handle that recomputes it. ``stores_last_slice``: the K
    and V of a document's last slice lie in the store, too. ``stores_latent``: layers with latent
    attention keep latents in the place of K and V. ``all_heads``: the same over all heads of the
    tensor-parallel rank, for documents that one context-parallel rank computes alone."""

    name: str
    stores_last_slice: bool
    stores_latent: bool

    @property
    def all_heads(self) -> "Attention": ...

    def __call__(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, state: ChunkState, layer: int, drop: bool
    ) -> tuple[Tensor, RecomputeHandle | None]: ...

    def of_layer(self, before: int | None, sinks: Callable[[], Tensor | None]) -> "Attention":
        """The attention of a layer with a window (queries see ``before`` inputs in front of them)
        or with sinks (logits of its heads, [H]). ValueError, ImportError: its kernels lack them."""
        ...


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one call of a kernel: ``query`` heads in ``key`` groups, of ``size`` each; those of
    values may have another, ``value``."""

    query: int
    key: int
    size: int
    scale: float
    dtype: torch.dtype
    value: int = 0  # 0: as ``size``

    def __post_init__(self):
        if not self.value:
            object.__setattr__(self, "value", self.size)
