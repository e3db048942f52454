"""Layers whose saved tensors lie in the host's memory from F to B (runtime.host_store).

What a layer saved is its own and goes: its input, too, as nobody else saves that. Parameters, kept
K and V, and what all layers of a chunk are given (the rotary table) stay where they are.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.chunk_state import ChunkState


def offloading(
    state: ChunkState, layer: int, others: Mapping[str, Any]
) -> AbstractContextManager[None]:
    """A context for the forward of ``layer``, which is given ``others`` beside its input."""
    assert state.host is not None, "a chunk that is offloaded has a store on the host"
    excluded = {tensor.untyped_storage()._cdata for tensor in _tensors(tuple(others.values()))}

    def shared(tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in excluded or state.store.holds(layer, tensor)

    return state.host.layer(state.chunk, shared)


def entrance(received: Tensor) -> tuple[Tensor, Tensor]:
    """(leaf, hidden): a leaf of the shape of ``received`` that holds no data, for its gradient, and
    ``received`` as what follows from it.

    A stage keeps the leaf until B. Were it ``received`` itself, that would stay on the device,
    whatever becomes of what its first layer saved.
    """
    leaf = received.new_empty(1).expand(received.shape).requires_grad_()
    return leaf, _Entrance.apply(leaf, received)


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        # Dense: a leaf without strides of its own takes over what has none, and nothing else.
        return gradient.contiguous(), None


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(tuple(value))
