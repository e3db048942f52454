"""Experts of Megatron's MoE layers as one grouped product (layers/moe/weight_stack.py).

This module replaces the two linears of Transformer Engine's grouped experts
(core/transformer/moe/experts.py). The activation, its recompute, the routing weights, the
parameters and their buffers remain Megatron's. The modules of the linears also remain, because
their forward pre-hooks gather parameters.

    routing map [t, E]    the columns of each rank's experts are reversed after routing, so that
                          rows arrive in the order of the stack, from the last expert to the first
    counts of rows        become ends on the device, instead of a list on the host
    experts on one rank   nothing is read back; rows arrive sorted, and are not sorted a second time

All ranks make the same choice (:func:`stack_experts`), because ranks send rows in the order that
the receiving rank's experts expect.
"""

import logging
from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn import Parameter

from megatron_epp.layers.moe.weight_stack import (
    WeightStack,
    distance,
    move_together,
    reported,
    row_ends,
    set_stack,
)
from megatron_epp.runtime.consensus import all_gathered

logger = logging.getLogger(__name__)

_LINEARS = {
    "linear_fc1": "TEColumnParallelGroupedLinear",
    "linear_fc2": "TERowParallelGroupedLinear",
}
_ALIGNMENT = 16  # bytes, of the rows of a grouped product's operands
_DISPATCHERS = (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher)


def stack_experts(models: Sequence[Any], group: dist.ProcessGroup | None) -> None:
    """Patch the grouped experts of ``models`` to compute one product for each linear.

    If a layer of any rank does not support this product, all layers keep Transformer Engine's
    linears, and rank 0 logs the reasons. All ranks must call this function after Megatron has
    wrapped the models and before it builds the optimizer, because weights in separate storages are
    moved into one storage.

    Args:
        models: Stage modules of this rank.
        group: All ranks of the job; None for a single rank.
    """
    layers = [(model, layer) for model in models for layer in _grouped_layers(model)]
    reasons = sorted({reason for _, layer in layers if (reason := _obstacle(layer)) is not None})
    every = [reasons] if group is None else all_gathered(reasons, group)
    if reasons := sorted({reason for of_rank in every for reason in of_rank}):
        if group is None or group.rank() == 0:
            logger.info("experts: a product for each, because of %s", "; ".join(reasons))
        return
    for model, layer in layers:
        _install(layer, partial(_report_ready, model) if hasattr(model, _BUCKETS) else None)


def _grouped_layers(model: Any) -> list[MoELayer]:
    """Return the MoE layers of ``model`` with Transformer Engine's grouped experts."""
    return [
        module
        for module in unwrap_model(model).modules()
        if isinstance(module, MoELayer) and isinstance(module.experts, TEGroupedMLP)
    ]


# ------------------------------------------------------------------ whether a layer can


def _obstacle(layer: MoELayer) -> str | None:
    """Return the reason why the experts of ``layer`` cannot be one product; None if they can."""
    experts, config = layer.experts, layer.config
    linears = {name: getattr(experts, name) for name in _LINEARS}
    obstacles = {
        "fp8 or fp4": config.fp8
        or config.fp4
        or any(getattr(linear, "te_quant_params", None) for linear in linears.values()),
        "biases of experts": config.add_bias_linear,
        "expert tensor parallelism": experts.tp_group.size() > 1,
        "Transformer Engine's op fuser": getattr(experts, "_with_fused_impl", False),
        f"experts by {type(experts).__name__}": type(experts) is not TEGroupedMLP,
        "adapters or quantised linears": any(
            type(linears[name]).__name__ != known for name, known in _LINEARS.items()
        ),
        "an MTP layer that runs several times": getattr(layer.router, "is_mtp_layer", False)
        and getattr(config, "mtp_use_repeated_layer", False),
        f"token dispatcher {config.moe_token_dispatcher_type}": type(layer.token_dispatcher)
        not in _DISPATCHERS,
        "a single expert on a rank": experts.num_local_experts == 1,
        "Transformer Engine's own grouped tensors": config.moe_single_grouped_weight
        or getattr(experts, "_use_grouped_tensor", False),  # since 0.20
    }
    if any(obstacles.values()):
        return next(reason for reason, applies in obstacles.items() if applies)
    return next(filter(None, map(_obstacle_of_weights, map(_weights_of, linears.values()))), None)


def _obstacle_of_weights(weights: Sequence[Parameter]) -> str | None:
    """Return the reason why the weights of one linear cannot be one stack; None if they can."""
    one = weights[0]
    if not all(weight.requires_grad for weight in weights):
        return "frozen experts"
    if not _has_kernel(one):
        return f"no grouped product of {one.dtype} on this device"
    unaligned = any(size * one.element_size() % _ALIGNMENT for size in one.shape)
    if one.dtype == torch.bfloat16 and unaligned:
        return f"weights of {tuple(one.shape)}, not in multiples of {_ALIGNMENT} bytes"
    apart = all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights)
    if not apart and distance([weight.data for weight in weights]) is None:
        return "gaps between the weights of experts in their buffer"
    gradients = [getattr(weight, "main_grad", None) for weight in weights]
    wrapped = [gradient for gradient in gradients if gradient is not None]
    if wrapped and (len(wrapped) < len(weights) or distance(wrapped) is None):
        return "gaps between the gradients of experts in their buffer"
    return None


def _has_kernel(weight: Tensor) -> bool:
    """Return whether torch has a grouped product for ``weight``; on a CPU, a loop also counts."""
    on_cpu = weight.device.type == "cpu"
    if weight.dtype != torch.bfloat16:
        return on_cpu
    of_device = on_cpu or torch.cuda.get_device_capability(weight.device)[0] in (9, 10)
    return hasattr(torch, "_grouped_mm") and of_device


def _weights_of(linear: Any) -> list[Parameter]:
    return [getattr(linear, f"weight{index}") for index in range(linear.num_gemms)]


# ------------------------------------------------------------------ the layer


class _RowEnds:
    """Ends of the experts' rows, which Megatron's experts pass to both linears.

    Megatron passes ``tokens_per_expert.tolist()``; here, that is this object.
    """

    def __init__(self, ends_E: Tensor):
        self.ends_E = ends_E

    def tolist(self) -> "_RowEnds":
        return self


def _install(layer: MoELayer, report: Any) -> None:
    """Replace the linears of the layer's experts by stacks, and sort rows in their order."""
    experts, dispatcher = layer.experts, layer.token_dispatcher
    stacks = []
    for name in _LINEARS:
        linear = getattr(experts, name)
        weights = _weights_of(linear)
        if distance([weight.data for weight in weights]) is None:
            move_together(weights)
        stack = WeightStack(weights)
        if report is not None:
            stack.report = report
        set_stack(linear, stack)
        stacks.append(stack)
        linear.forward = partial(_multiply, stack)
    experts.forward = _with_row_ends(experts.forward)
    layer.route = _reversing(layer.route, experts.num_local_experts, stacks)
    if isinstance(dispatcher, MoEAlltoAllTokenDispatcher) and dispatcher.ep_size == 1:
        _stay_on_device(dispatcher)


def _multiply(stack: WeightStack, rows_tK: Tensor, row_ends: _RowEnds) -> tuple[Tensor, None]:
    return stack(rows_tK, row_ends.ends_E), None


def _with_row_ends(forward: Any) -> Any:
    @wraps(forward)
    def wrapped(rows_tK: Tensor, tokens_per_expert: Tensor, *args: Any, **others: Any) -> Any:
        counts_E = tokens_per_expert.to(rows_tK.device, non_blocking=True)
        return forward(rows_tK, _RowEnds(row_ends(counts_E)), *args, **others)

    return wrapped


def _reversing(route: Any, on_a_rank: int, stacks: Sequence[WeightStack]) -> Any:
    @wraps(route)
    def wrapped(*args: Any, **others: Any) -> tuple[Tensor, Tensor]:
        probs_tE, routing_map_tE = route(*args, **others)
        probs_tE = reverse_experts(reported(probs_tE, stacks), on_a_rank)
        return probs_tE, reverse_experts(routing_map_tE, on_a_rank)

    return wrapped


def reverse_experts(columns_tE: Tensor, on_a_rank: int) -> Tensor:
    """Return the columns of all experts, with those of each rank's experts in reverse order."""
    return columns_tE.unflatten(1, (-1, on_a_rank)).flip(2).flatten(1)


def _stay_on_device(dispatcher: MoEAlltoAllTokenDispatcher) -> None:
    """Make a dispatcher without an exchange read nothing back, and sort rows once.

    Rows are sorted by expert before the exchange; after it, Megatron sorts what several ranks sent,
    unless a rank has one expert.
    """
    dispatcher.num_local_experts = 1
    dispatcher._maybe_dtoh_and_synchronize = lambda point, counts=None: counts


# ------------------------------------------------------------------ reduction

_BUCKETS = "param_to_bucket_group"  # attribute of Megatron's DDP


def _report_ready(ddp: Any, weights: Sequence[Parameter]) -> None:
    """Report complete gradients to ``ddp``, as its hooks do for other parameters."""
    if not ddp.ddp_config.overlap_grad_reduce:
        return
    groups = ddp.param_to_bucket_group
    if groups[weights[0]].is_last_microbatch:
        for weight in weights:
            groups[weight].register_grad_ready(weight, ddp.force_all_reduce)
