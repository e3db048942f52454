"""A model's tensors in the coordinates of the whole model, as Megatron's checkpoints know them.

Which part of which weight a rank holds is written once, in Megatron's ``sharded_state_dict``. Here
it carries weights from the plain model to the ranks, and gradients back.
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
    """``model`` is one of Megatron's."""
    state = model.sharded_state_dict()
    apply_factories(state)
    return (value for value in nested_values(state) if isinstance(value, ShardedTensor))


def _place(tensor: ShardedTensor) -> tuple[int | slice, ...]:
    """Where the rank's part lies in the whole: layers by their number, then ranges. (0.19 has
    ``global_slice`` for it; later ones do not.)"""
    offsets, layers = tensor.global_offset, tensor.prepend_axis_num
    starts = zip(offsets[layers:], tensor.local_shape, strict=True)
    return *offsets[:layers], *(slice(start, start + size) for start, size in starts)


def shards(model: nn.Module, tensor_of: Callable[[Any], Tensor]) -> list[Shard]:
    """``tensor_of`` every parameter (itself, or its gradient), cut as the parameter is cut; in
    float64, whatever it is in."""
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
    """Other parameters stand in the modules for a while: with data of another format in its place,
    a parameter would lose the hooks that reduce its gradient."""
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
    """Write the whole model's ``weights`` (numpy, by key) into this rank's parameters; those held
    in fp8 have their main copy beside them (``certified_main``), as an optimizer's."""
    mains = {one: main_copy(one) for one in model.parameters() if is_float8tensor(one)}
    with torch.no_grad():
        with _in_place_of_parameters(model, lambda one: mains.get(one, one)):
            for tensor in _sharded(model):
                part = weights[tensor.key][_place(tensor)]
                tensor.data.copy_(torch.from_numpy(part))
        for parameter, main in mains.items():
            parameter.copy_(main)


def main_copy(parameter: Any) -> Tensor:
    if not hasattr(parameter, "certified_main"):
        shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
        parameter.certified_main = torch.empty(shape, dtype=dtype, device=device)
    return parameter.certified_main
