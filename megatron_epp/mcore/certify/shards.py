"""Shards of a model's tensors with their indices in the full tensors, as in checkpoints.

Megatron's ``sharded_state_dict`` defines which part of a weight a rank has. With it, ``certify``
copies weights of the reference model to the ranks, and assembles the ranks' gradients.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor, nn

from megatron_epp.certify.compare import Shard


def _sharded(model: Any) -> Iterator[ShardedTensor]:
    """Return an iterator over the ``ShardedTensor`` objects of Megatron's ``model``."""
    state = model.sharded_state_dict()
    apply_factories(state)
    return (value for value in nested_values(state) if isinstance(value, ShardedTensor))


def _place(tensor: ShardedTensor) -> tuple[int | slice, ...]:
    """Return the index of this rank's shard in the global tensor.

    The index contains an int for each prepended axis, such as the layer, and a slice for each axis
    of the shard. Megatron 0.19 has ``ShardedTensor.global_slice`` for this; later versions do not.
    """
    offsets, layers = tensor.global_offset, tensor.prepend_axis_num
    starts = zip(offsets[layers:], tensor.local_shape, strict=True)
    return *offsets[:layers], *(slice(start, start + size) for start, size in starts)


def shards(model: nn.Module, tensor_of: Callable[[Any], Tensor]) -> list[Shard]:
    """Return the shards of ``tensor_of(parameter)`` for all parameters, in float64.

    ``tensor_of`` returns a tensor with the shape of the parameter, such as its gradient.
    """
    with _in_place_of_parameters(model, tensor_of):
        return [
            Shard(
                tensor.key,
                tuple(tensor.global_shape),
                _place(tensor),
                tensor.data.detach().to("cpu", torch.float64, copy=True).numpy(),
            )
            for tensor in _sharded(model)
        ]


@contextmanager
def _in_place_of_parameters(model: nn.Module, tensor_of: Callable[[Any], Tensor]) -> Iterator[None]:
    """Replace each parameter of ``model`` by a parameter with ``tensor_of(parameter)`` as data.

    The context restores the original parameters at its end. It replaces parameters and not their
    data, because a change of dtype would remove the hooks that reduce the gradients.
    """
    others: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in model.parameters():
        other = tensor_of(parameter)
        assert other.shape == parameter.shape, "a gradient has its parameter's shape"
        others[parameter] = nn.Parameter(other, requires_grad=False)
        vars(others[parameter]).update(vars(parameter))
    held = [(module._parameters, dict(module._parameters)) for module in model.modules()]
    try:
        for place, names in held:
            place.update({n: others[p] for n, p in names.items() if p is not None})
        yield
    finally:
        for place, names in held:
            place.update(names)


def fill(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Copy the full model's ``weights`` (numpy, by checkpoint key) into this rank's parameters.

    For parameters in fp8, the function also stores the weights in a main copy in the parameter's
    unquantised dtype (``certified_main``).
    """
    mains = {one: main_copy(one) for one in model.parameters() if is_float8tensor(one)}
    with torch.no_grad():
        with _in_place_of_parameters(model, lambda one: mains.get(one, one)):
            for tensor in _sharded(model):
                part = weights[tensor.key][_place(tensor)]
                tensor.data.copy_(torch.from_numpy(part))
        for parameter, main in mains.items():
            parameter.copy_(main)


def main_copy(parameter: Any) -> Tensor:
    """Return the unquantised main copy of an fp8 ``parameter``; the first call allocates it."""
    if not hasattr(parameter, "certified_main"):
        shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
        parameter.certified_main = torch.empty(shape, dtype=dtype, device=device)
    return parameter.certified_main
