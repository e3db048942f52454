"""fp8 in Transformer Engine's linears, as elastic pipelines need it.

Which layers compute in fp8 is said around a layer's forward, by Megatron's block. What backward
computes again runs outside of that: so every linear says it for itself. Weights are quantised by a
linear's first forward of an iteration, and kept; what is kept is thrown away before the next one,
as nothing else tells Transformer Engine that the weights have changed: no micro-batch is the first
here (elastic_layers.py). Weights that are held in fp8 (--fp8-param-gather) are made so by the
optimizer's step, and linears keep nothing beside them.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core import fp8_utils
from torch import nn

from megatron_epp.mcore.kinds.mtp.mtp_layers import mtp_layers_of

logger = logging.getLogger(__name__)

# Bytes of a quantised weight's number, by rows and by columns, with its share of the scales. (Where
# products read either, as on Blackwell, one scale for all needs half.)
COPY_BYTES = {"tensorwise": 2.0, "blockwise": 2 * (1 + 4 / 128**2), "mxfp8": 2 * (1 + 1 / 32)}

# Of a module of Transformer Engine's: quantised weights by their names.
_CACHED_WEIGHTS = "_fp8_workspaces"


def per_tensor_scales(args: Any) -> bool:
    """Whether what is computed together shares one scale, so that results depend on the plan."""
    return bool(getattr(args, "fp8", None)) and args.fp8_recipe == "tensorwise"


def warn_of_scales(args: Any) -> None:
    """Say once in a job, on rank 0, that its results depend on the plan."""
    if args.rank == 0 and per_tensor_scales(args):
        logger.warning(
            "megatron_epp: --fp8-recipe tensorwise: what is computed together shares a scale, so "
            "results depend on the plan, within fp8's own rounding; less with "
            "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1, not with --fp8-recipe blockwise or mxfp8"
        )


def weight_bytes(args: Any) -> float:
    """Bytes of a parameter between iterations and in them, of a job with Megatron's ``args``: a
    weight and what is kept quantised of it, or that alone; of an embedding at least its format."""
    full_precision = float(args.params_dtype.itemsize)
    if not getattr(args, "fp8", None):
        return full_precision
    copies = COPY_BYTES[args.fp8_recipe]
    return max(full_precision, copies) if args.fp8_param_gather else full_precision + copies


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
    for depth in mtp_layers_of(model):  # counted anew, and never among the first and last in bf16
        numbers |= dict.fromkeys(filter(quantises, depth.module.modules()), 0)
    for module, number in numbers.items():
        module.disable_parameter_transpose_cache = False
        module.forward = _in_fp8(module.forward, config, number - 1)


def quantises(module: nn.Module) -> bool:
    """Whether ``module`` is a linear that can."""
    return hasattr(module, _CACHED_WEIGHTS) and hasattr(module, "is_first_microbatch")


def forget_quantised_weights(model: nn.Module) -> None:
    """Have the weights quantised anew: at the begin of an iteration."""
    for module in model.modules():
        kept = getattr(module, _CACHED_WEIGHTS, None)
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
