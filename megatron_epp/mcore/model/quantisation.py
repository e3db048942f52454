"""fp8 in Transformer Engine's linears, as elastic pipelines need it.

Which layers compute in fp8 is said around a layer's forward, by Megatron's block. What backward
computes again runs outside of that: so every linear says it for itself. Weights are quantised by a
linear's first forward of an iteration, and kept; what is kept is thrown away before the next one,
as nothing else tells Transformer Engine that the weights have changed: no micro-batch is the first
here (elastic_layers.py).
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core import fp8_utils
from torch import nn

from megatron_epp.mcore.model.prediction.depths import depths_of

_KEPT = "_fp8_workspaces"  # of a module of Transformer Engine's: quantised weights by their names


def scales_of_whole_tensors(args: Any) -> bool:
    """Whether what is computed together shares one scale, so that results depend on the plan."""
    return bool(getattr(args, "fp8", None)) and args.fp8_recipe == "tensorwise"


def quantise_everywhere(model: nn.Module, config: Any) -> None:
    """Make the linears in layers of ``model`` compute in the format of ``config`` whoever runs
    them, and keep their quantised weights until :func:`forget_quantised_weights`."""
    if not getattr(config, "fp8", None):
        return
    numbers: dict[Any, int] = {}
    for layer in model.modules():  # inner ones last
        number = getattr(layer, "layer_number", None)
        if number is not None:
            numbers |= dict.fromkeys(filter(quantises, layer.modules()), number)
    for depth in depths_of(model):  # counted anew, and never among the first and last in bf16
        numbers |= dict.fromkeys(filter(quantises, depth.module.modules()), 0)
    for module, number in numbers.items():
        module.disable_parameter_transpose_cache = False
        module.forward = _in_fp8(module.forward, config, number - 1)


def quantises(module: nn.Module) -> bool:
    """Whether ``module`` is a linear that can."""
    return hasattr(module, _KEPT) and hasattr(module, "is_first_microbatch")


def forget_quantised_weights(model: nn.Module) -> None:
    """Have the weights quantised anew: at the begin of an iteration."""
    for module in model.modules():
        kept = getattr(module, _KEPT, None)
        if kept:
            kept.clear()


def _in_fp8(forward: Callable[..., Any], config: Any, layer: int) -> Callable[..., Any]:
    state: Any = fp8_utils.FP8GlobalStateManager  # there where Transformer Engine is

    @wraps(forward)
    def wrapped(*args: Any, **others: Any) -> Any:
        if state.is_fp8_enabled():
            return forward(*args, **others)
        with fp8_utils.get_fp8_context(config, layer):
            return forward(*args, **others)

    return wrapped
