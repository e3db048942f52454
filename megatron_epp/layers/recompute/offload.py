"""Offloading of a layer's saved tensors to host memory between F and B (runtime.host_store).

Tensors that only one layer saves, such as the layer's input, are offloaded. Parameters, cached K/V,
and tensors that all layers of a chunk share (the rotary table) stay on the device.
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
    """Return a context that offloads the tensors that ``layer`` saves in its forward.

    Args:
        state: state of the chunk.
        layer: number of the layer in the stage.
        others: arguments of the layer except the hidden states; these arguments stay on the device.
    """
    assert state.host is not None, "a chunk that is offloaded has a store on the host"
    excluded = {tensor.untyped_storage()._cdata for tensor in _tensors(tuple(others.values()))}

    def shared(tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in excluded or state.store.holds(layer, tensor)

    return state.host.layer(state.chunk, shared)


def entrance(received: Tensor) -> tuple[Tensor, Tensor]:
    """Return (leaf, hidden states); the leaf receives their gradient, and has no data.

    Both have the shape of ``received``. A stage saves the leaf until B. If ``received`` were the
    leaf, its data would stay on the device although the first layer is offloaded.
    """
    leaf = received.new_empty(1).expand(received.shape).requires_grad_()
    return leaf, _Entrance.apply(leaf, received)


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        # Dense: a leaf without strides of its own accepts a gradient with any; others need it.
        return gradient.contiguous(), None


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(tuple(value))
