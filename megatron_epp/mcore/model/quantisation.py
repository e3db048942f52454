"""fp8 in Transformer Engine's linears on chunks.

Megatron's TransformerBlock enters an fp8 context around each layer's forward. Recomputation in a
backward does not run in that context, so here every linear enters the fp8 context itself. A linear
quantises its weight in the first forward of an iteration, and caches the result. The cache is
cleared before the next iteration. Otherwise Transformer Engine would use old weights, because no
micro-batch is marked as the first (elastic_layers.py). With --fp8-param-gather, the optimizer
quantises the weights, and linears cache nothing.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core import fp8_utils
from torch import nn

from megatron_epp.mcore.kinds.mtp.mtp_layers import mtp_layers_of

logger = logging.getLogger(__name__)

# Bytes per element of a quantised weight: a row-wise and a column-wise copy, and their scales.
# (An upper bound: on Blackwell with one scale per tensor, a single copy serves both purposes.)
COPY_BYTES = {"tensorwise": 2.0, "blockwise": 2 * (1 + 4 / 128**2), "mxfp8": 2 * (1 + 1 / 32)}

# Attribute of Transformer Engine's modules: quantised weights by name.
_CACHED_WEIGHTS = "_fp8_workspaces"


def per_tensor_scales(args: Any) -> bool:
    """Return whether fp8 uses one scale per tensor, so that results depend on the plan."""
    return bool(getattr(args, "fp8", None)) and args.fp8_recipe == "tensorwise"


def warn_of_scales(args: Any) -> None:
    """Log a warning on rank 0 if fp8 uses one scale per tensor: results depend on the plan."""
    if args.rank == 0 and per_tensor_scales(args):
        logger.warning(
            "megatron_epp: --fp8-recipe tensorwise: what is computed together shares a scale, so "
            "results depend on the plan, within fp8's own rounding; less with "
            "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1, not with --fp8-recipe blockwise or mxfp8"
        )


def weight_bytes(args: Any) -> float:
    """Return the bytes per parameter of the weights, including quantised copies.

    With --fp8-param-gather, only the quantised copies count. The result is at least the size of
    ``params_dtype``, because embeddings are not quantised.
    """
    full_precision = float(args.params_dtype.itemsize)
    if not getattr(args, "fp8", None):
        return full_precision
    copies = COPY_BYTES[args.fp8_recipe]
    return max(full_precision, copies) if args.fp8_param_gather else full_precision + copies


def quantise_everywhere(model: nn.Module, config: Any) -> None:
    """Patch the linears of ``model`` to compute in the fp8 format of ``config`` in every forward.

    The linears cache their quantised weights until :func:`forget_quantised_weights` is called.
    Without fp8, the function does nothing.
    """
    if not getattr(config, "fp8", None):
        return
    numbers: dict[Any, int] = {}
    for layer in model.modules():  # outer modules first, so that inner layers override
        number = getattr(layer, "layer_number", None)
        if number is not None:
            numbers |= dict.fromkeys(filter(quantises, layer.modules()), number)
    # MTP layers are numbered separately, and never belong to the first and last layers in bf16.
    for depth in mtp_layers_of(model):
        numbers |= dict.fromkeys(filter(quantises, depth.module.modules()), 0)
    for module, number in numbers.items():
        module.disable_parameter_transpose_cache = False
        module.forward = _in_fp8(module.forward, config, number - 1)


def quantises(module: nn.Module) -> bool:
    """Return whether ``module`` is a linear of Transformer Engine with a quantised weight cache."""
    return hasattr(module, _CACHED_WEIGHTS) and hasattr(module, "is_first_microbatch")


def forget_quantised_weights(model: nn.Module) -> None:
    """Clear the quantised weights cached in ``model``, because an optimizer step changed them."""
    for module in model.modules():
        kept = getattr(module, _CACHED_WEIGHTS, None)
        if kept:
            kept.clear()


def _in_fp8(forward: Callable[..., Any], config: Any, layer: int) -> Callable[..., Any]:
    state: Any = fp8_utils.FP8GlobalStateManager  # exists only with Transformer Engine

    @wraps(forward)
    def wrapped(*args: Any, **others: Any) -> Any:
        if state.is_fp8_enabled():
            return forward(*args, **others)
        with fp8_utils.get_fp8_context(config, layer):
            return forward(*args, **others)

    return wrapped
