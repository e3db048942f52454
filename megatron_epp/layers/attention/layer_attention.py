"""Interface between layers and attention, and description of the heads of a kernel call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.recompute.outputs import RecomputeHandle


class Attention(Protocol):
    """Attention of one layer on a chunk.

    Attributes:
        name: name of the back end.
        stores_last_slice: whether K/V of a document's last slice are also stored.
    """

    name: str
    stores_last_slice: bool

    @property
    def all_heads(self) -> "Attention":
        """Attention over all heads of the tensor-parallel rank; single-rank documents need it."""

    def __call__(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, state: ChunkState, layer: int, drop: bool
    ) -> tuple[Tensor, RecomputeHandle | None]:
        """Compute the attention of all rows of the chunk.

        Args:
            q_THD: queries [T, H, D].
            k_TGD: keys [T, G, D].
            v_TGD: values [T, G, D].
            state: state of the chunk.
            layer: number of the layer in the stage.
            drop: whether the output is dropped after its use, and recomputed for the backward.

        Returns:
            The output [T, H, D] and, with ``drop``, the handle that recomputes it.
        """

    def of_layer(self, before: int | None, sinks: Callable[[], Tensor | None]) -> "Attention":
        """Return the attention of a layer with a window or sinks.

        Args:
            before: number of earlier tokens that a query sees (window); None for all.
            sinks: function that returns the logits [H] of the heads' sinks, or None without sinks.

        Raises:
            ValueError: if the kernels do not support the window or the sinks.
            TypeError: if the installed version of the kernels' package does not support sinks.
            ImportError: if a required package is missing.
        """
        ...


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one call of a kernel.

    Attributes:
        query: number of query heads.
        key: number of key heads.
        size: head size of queries and keys.
        scale: scale of the logits.
        dtype: dtype of the tensors.
        value: head size of values; 0 means ``size``.
    """

    query: int
    key: int
    size: int
    scale: float
    dtype: torch.dtype
    value: int = 0

    def __post_init__(self):
        if not self.value:
            object.__setattr__(self, "value", self.size)
