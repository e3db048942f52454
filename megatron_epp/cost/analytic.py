"""Analytic profiles: seconds and bytes from a model's flops and bytes and a device's rates.

A profile has such coefficients for each layer kind. For MoE, tokens are assumed to be distributed
evenly over the experts.

Ops I and W together take longer than op B: W reads the inputs and output gradients of matrix
products again, and I exposes communication that B hides (:mod:`megatron_epp.cost.seconds`). Linears
that cannot defer their weight gradients to W compute them in I.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_epp.cost.catalogue.devices import Device
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.columns import CONTEXT
from megatron_epp.cost.kinds.base import (
    ATTENTION_BACKWARD,
    BF16,
    ELEMENT_BYTES,
    GRADIENT_BYTES,
    MOVED_BACKWARD,
    STATE_BYTES,
    CarryOver,
    RecomputedModule,
    Work,
    element_bytes,
    summed_bytes,
)
from megatron_epp.cost.kinds.layer import Layer
from megatron_epp.cost.network.topology import TOPOLOGIES, Network
from megatron_epp.cost.profile import (
    ALLTOALL,
    ANALYTIC,
    FLEX,
    MODES,
    Bytes,
    LayerCoefficients,
    Profile,
    Provenance,
    Seconds,
    States,
    Workspace,
)
from megatron_epp.ir import BACKWARDS, FULL, KEEP, SELECTIVE, Kind

# Fraction of the time to read weights at the memory rate that a product takes in addition to its
# flops. It fits cuBLAS on an H100 with few rows (`cublas-h100` of the public measurements).
WEIGHT_READ = 0.75
# LayerNorms and activation functions only move memory; their recompute takes this fraction of the
# linear layers' forward.
NORM_FRACTION = 0.01
# Linears that compute their weight gradients in I: experts with grouped products, or all linears.
EXPERTS, ALL = "experts", "all"
# Rows whose logits exist at a time with a fused LM head and loss on a GPU. Each block computes a
# gradient of the full output weight, which is written, read and added to main_grad: 0.45 ms for 32K
# vocabulary entries, compared with 2 ms of products for 1024 rows. Blocks are therefore as large as
# this number of logits allows. In bf16, with two float32 copies of the loss, they take at most
# about 2.5 GiB.
HEAD_BLOCK_TOKENS = (4096, 2048, 1024)
HEAD_BLOCK_LOGITS = 2**28


def profile(
    model: Model,
    device: Device,
    *,
    head_seconds: bool = True,
    link_seconds: bool = True,
    logits_held: bool = True,
    kv_read: bool = False,
    moe_token_dispatcher_type: str = ALLTOALL,
    kept_in_input: str = EXPERTS,
    dtype: str = BF16,
) -> Profile:
    """Return the analytic profile of ``model`` on ``device``, for one layer of every kind.

    Args:
        model: sizes of the model.
        device: rates of the device.
        head_seconds: whether the LM head on the last stage takes time.
        link_seconds: whether messages between stages take time.
        logits_held: whether logits are held from F to B. Otherwise they exist only during F, and F
            includes the LM head's backward (layers.lm_head.fused_loss), as in training.
        kv_read: whether reading the K and V of a slice's context and accumulating their gradients
            takes time.
        moe_token_dispatcher_type: how tokens are sent to experts, as in Megatron's flag; values
            other than ``flex`` count as ``alltoall``.
        kept_in_input: linears whose weight gradients are computed in op I instead of W: EXPERTS,
            ALL, or "".
        dtype: data type of weights and activations, as torch names it. It scales bytes, but not the
            rates of products, which are those of bf16.
    """
    token_dispatcher = FLEX if moe_token_dispatcher_type == FLEX else ALLTOALL
    dtype = dtype.removeprefix("torch.")
    element, summed = element_bytes(dtype), summed_bytes(dtype)
    coefficients = {
        kind: _coefficients(layer, device, kv_read, token_dispatcher, kept_in_input, dtype)
        for kind, layer in model.shapes.items()
    }
    source = "analytic: flops and bytes of the device's rates"
    head_inputs = float(element * (model.hidden + model.vocabulary))
    head_token = 2.0 * model.vocabulary_parameters / device.linear_flops if head_seconds else 0.0
    of_head = [each * head_token for each in ((1, 2, 1, 1) if logits_held else (3, 0, 0, 0))]
    if head_seconds and logits_held:
        of_head[-1] += _read_seconds(head_inputs, device)
    # Of one logit: its softmax, held from F to B; and in F the logit, in B its gradient
    # (megatron.core.tensor_parallel.cross_entropy).
    softmax = float(summed * model.vocabulary)
    logits = float(element * model.vocabulary) + softmax * (not logits_held)
    none = {kind: Workspace() for kind in Kind if kind in _COMPUTE}
    with_logits = (Kind.FORWARD, *BACKWARDS) if logits_held else (Kind.FORWARD,)
    boundary = element * model.hidden
    (first, its), *others = coefficients.items()
    of_first = {
        field.name: getattr(its, field.name) for field in dataclasses.fields(LayerCoefficients)
    }
    return Profile(
        provenance=Provenance(model.name, device.name, dtype, "2026-11-21", source, ANALYTIC),
        tp=1,
        cp=1,
        **of_first,
        first_seconds={kind: Seconds() for kind in _COMPUTE},
        last_seconds=dict(zip(_COMPUTE, map(Seconds, of_head), strict=True)),
        first_bytes=Bytes(),
        last_bytes=Bytes(softmax, softmax) if logits_held else Bytes(),
        stores_last_slice=False,
        last_weight_input_bytes=Bytes(head_inputs, head_inputs) if logits_held else Bytes(),
        last_workspace_bytes=none | dict.fromkeys(with_logits, Workspace(logits, logits)),
        last_workspace_tokens=0.0,
        all_to_all_bytes_per_second=_rates_by_size(device),
        tensor_bytes_per_second=_rates_by_size(device),
        link_seconds_per_token=boundary / device.link_bytes_per_second if link_seconds else 0.0,
        link_latency_seconds=device.link_latency_seconds if link_seconds else 0.0,
        first_parameters=model.vocabulary_parameters,
        last_parameters=model.vocabulary_parameters,
        states=STATES,
        host_bytes_per_second=device.host_bytes_per_second,
        token_dispatcher=token_dispatcher,
        layer_kind=first,
        other_kinds=dict(others),
    )


def _rates_by_size(device: Device) -> dict[int, float]:
    """Return all-to-all bytes per second by group size, slowed by copies in a device's memory."""
    if not device.memory_efficiency:
        return dict(device.group_bytes_per_second)
    network = Network.of(TOPOLOGIES["nodes"], device)
    sizes = (2**power for power in range(1, 7))
    return {size: 1 / (1 / network.all_to_all(size) + network.copy_seconds(1.0)) for size in sizes}


def head_block_tokens(words: int) -> int:
    """Return the tokens per block of a fused LM head with ``words`` vocabulary entries."""
    fitting = (rows for rows in HEAD_BLOCK_TOKENS if rows * words <= HEAD_BLOCK_LOGITS)
    return next(fitting, HEAD_BLOCK_TOKENS[-1])


def _kv_read_seconds(layer: Layer, device: Device, dtype: str) -> dict[Kind, float]:
    """Return the seconds to read K and V of the context, per context token, by kind of op.

    Backward reads K and V again, and writes, reads and accumulates their gradients. Blocks of
    queries share K and V through the GPU's cache. K and V are therefore read from memory about
    once, independent of the slice's length. This assumption fits FlashAttention-3's table
    (tests/cost/test_published_attention.py). With a sliding window the result is empty, because
    the seconds per pair include this time.
    """
    rate, carried = device.memory_bytes_per_second, layer.carried.channels
    if not rate or layer.window or not carried:
        return {}
    element, gradient = element_bytes(dtype), summed_bytes(dtype)
    again = 3 * element + 2 * gradient  # K and V, their gradients twice, the store's
    return _without_weights(element * carried / rate, again * carried / rate)


def _without_weights(forward: float, backward: float) -> dict[Kind, float]:
    """Return seconds by kind of op, for work without weights: I takes as long as B, W takes 0."""
    ops = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
    return dict(zip(ops, (forward, backward, backward, 0.0), strict=True))


def _coefficients(
    layer: Layer,
    device: Device,
    kv_read: bool,
    token_dispatcher: str,
    kept_in_input: str,
    dtype: str,
) -> LayerCoefficients:
    """Return the coefficients of one layer, from flops and bytes."""
    element = element_bytes(dtype)
    linear = _product_flops(layer, device) / device.linear_flops  # forward seconds per token
    attention = layer.flops_per_pair / device.attention_flops  # forward seconds per pair
    # ZeRO 3 gathers a layer's weights in F and B and scatters its gradients in B.
    weights = element * (layer.parameters + layer.expert_parameters)
    gather = 3 * weights / device.group_bytes_per_second[min(device.group_bytes_per_second)]
    rate = device.memory_efficiency * device.memory_bytes_per_second
    # DeepEP and HybridEP sort tokens while they send them.
    moved = layer.moved + (layer.routed.permuted if token_dispatcher == ALLTOALL else 0.0)
    light = element * moved / rate if rate else 0.0
    saved, carried = _saved_bytes(layer, element), layer.carried
    back, pairs = MOVED_BACKWARD * light, ATTENTION_BACKWARD * attention
    # W reads the operands of its products again, which no cache holds after I. It launches neither
    # scans nor exchanges of tokens.
    flops, channels = _deferred(layer, device, kept_in_input)
    weight, weight_inputs = flops / device.linear_flops, float(element * channels)
    launch = device.launch_seconds * layer.launches
    tail = device.tail_seconds if layer.launches == 1 else 0.0
    launch_weight = device.launch_seconds if channels else 0.0
    columns = {
        column: _column_seconds(layer, work, device, attention)
        for column, work in layer.work.items()
    }
    if read := _kv_read_seconds(layer, device, dtype) if kv_read else {}:
        own = columns.get(CONTEXT, {})
        columns[CONTEXT] = {op: own.get(op, 0.0) + seconds for op, seconds in read.items()}
    workspaces = {kind: Workspace() for kind in _COMPUTE} | {
        op: Workspace(
            per_context_token=each.per_context_token * element / ELEMENT_BYTES, per_op=each.per_op
        )
        for op, each in layer.workspaces.items()
    }
    workspaces[Kind.INPUT] = workspaces[Kind.BACKWARD]
    issue = {
        op: layer.routed.issue * seconds
        for op, seconds in device.host_seconds.items()
        if layer.routed.issue
    }
    of_layer, of_experts = not (flops or channels), bool(kept_in_input)
    return LayerCoefficients(
        layer_seconds={
            Kind.FORWARD: Seconds(linear + light, attention, launch + tail),
            Kind.BACKWARD: Seconds(2 * linear + back, pairs, 2 * launch + tail / 2),
            Kind.INPUT: Seconds(
                2 * linear - weight + back, pairs, 2 * launch + tail / 2 - launch_weight
            ),
            Kind.WEIGHT: Seconds(weight + _read_seconds(weight_inputs, device), 0.0, launch_weight),
        },
        recompute_seconds=_recompute_seconds(layer, linear, attention, launch + tail, light),
        gather_seconds=dict.fromkeys(_COMPUTE, gather / 3) | {Kind.BACKWARD: 2 * gather / 3},
        saved_bytes=saved,
        **carried_bytes(carried, dtype),
        weight_input_bytes=Bytes(weight_inputs, weight_inputs),
        workspace_bytes=workspaces,
        recompute_workspace_bytes={mode: _difference(saved[KEEP], saved[mode]) for mode in MODES},
        all_to_all_bytes_per_token=float(element * layer.exchanged),
        # Gather and scatter of the hidden state around each sublayer that needs all of it.
        tensor_bytes_per_token=2.0 * layer.gathers * element * layer.model.hidden,
        layer_parameters=layer.parameters,
        window=layer.window,
        column_seconds=columns,
        kv_replicated=carried != CarryOver() and not carried.heads,
        # To the experts and back.
        expert_bytes_per_token=2.0 * element * layer.routed.exchanged,
        expert_parameters=float(layer.expert_parameters),
        heads=float(layer.heads),
        weight_seconds=in_input(_weight_seconds(layer.parameters, device, element), of_layer),
        expert_weight_seconds=in_input(
            _weight_seconds(layer.expert_parameters, device, element), of_experts
        ),
        host_seconds=in_input(device.host_seconds, of_layer),
        expert_host_seconds=in_input(issue, of_experts),
        expert_seconds=_expert_seconds(layer, device, of_experts),
        tensor_gathers=2.0 * layer.gathers,
        expert_copies=float(layer.routed.copies),
    )


def _deferred(layer: Layer, device: Device, kept_in_input: str) -> tuple[float, int]:
    """Return the forward flops per token, and channels from I to W, of products that W completes.

    W computes their weight gradients. Both numbers are 0 if it computes none.
    """
    experts = kept_in_input == EXPERTS
    inputs = layer.weight_inputs - experts * layer.routed.weight_inputs
    if kept_in_input == ALL or not inputs:
        return 0.0, 0
    flops = _product_flops(layer, device) - layer.scan_flops
    return flops - experts * (2.0 * layer.routed.active + _narrow_flops(layer, device)), inputs


def in_input(seconds: Mapping[Kind, float], kept: bool = True) -> Mapping[Kind, float]:
    """Return ``seconds`` by kind of op; if ``kept``, I takes as long as B, and W takes 0."""
    if not kept or not seconds:
        return seconds
    return {**seconds, Kind.INPUT: seconds[Kind.BACKWARD], Kind.WEIGHT: 0.0}


def _expert_seconds(layer: Layer, device: Device, kept_in_input: bool) -> dict[Kind, float]:
    """Return the seconds per token of routed experts' products, by kind of op that exchanges."""
    if not layer.routed.active:
        return {}
    forward = (2.0 * layer.routed.active + _narrow_flops(layer, device)) / device.linear_flops
    halves = (2.0, 0.0) if kept_in_input else (1.0, 1.0)
    return dict(zip(_COMPUTE, (forward, 2 * forward, *(n * forward for n in halves)), strict=True))


def _narrow_flops(layer: Layer, device: Device) -> float:
    return layer.routed.narrow_flops if device.memory_efficiency else 0.0


def _product_flops(layer: Layer, device: Device) -> float:
    """Return the forward flops per token of products and scans, increased for narrow experts."""
    return layer.flops_per_token + _narrow_flops(layer, device)


def _weight_seconds(parameters: int, device: Device, element: int) -> dict[Kind, float]:
    """Return the seconds per chunk, by kind of op, to read weights and accumulate gradients."""
    if not device.memory_efficiency or not parameters:
        return {}
    read = WEIGHT_READ * parameters / device.memory_bytes_per_second
    forward, weight = element * read, 2 * GRADIENT_BYTES * read
    seconds = (forward, forward + weight, forward, weight)
    return dict(zip(_COMPUTE, seconds, strict=True))


def _column_seconds(
    layer: Layer, work: Work, device: Device, attention: float
) -> dict[Kind, float]:
    """Return the seconds per unit of the additional column with this ``work``, by kind of op.

    ``attention`` is the layer's forward seconds per query-key pair.
    """
    if work.attention:
        forward = attention * work.flops
        forward /= layer.flops_per_pair or 1.0
    else:
        forward = work.flops / device.linear_flops
    return _without_weights(forward, work.backward * forward)


def _read_seconds(bytes_: float, device: Device) -> float:
    """Return the seconds to read ``bytes_`` from the device's memory; 0 if its rate is unknown."""
    rate = (device.memory_efficiency or 1.0) * device.memory_bytes_per_second
    return bytes_ / rate if rate else 0.0


_COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
# bf16 weights and float32 gradients on every device; float32 master weights and Adam's two moments
# are sharded, as in Megatron's distributed optimizer. ZeRO 3: 16 bytes per parameter, and buffers
# of three gathered layers, as FlexSP counts.
STATES = States(
    zero1_resident=6.0,
    zero1_sharded=12.0,
    zero3_sharded=16.0,
    zero3_gathered=float(ELEMENT_BYTES),
    zero3_layers=3.0,
)


def without_states(measured: Profile) -> Profile:
    """Return ``measured`` without bytes of model states, for budgets that exclude them (CPUs)."""
    return dataclasses.replace(measured, states=States(0.0, 0.0, 0.0, 0.0, 0.0))


def budgeted(profile: Profile) -> Profile:
    """Return ``profile`` without the bytes that the memory budget of training does not count.

    On a GPU the budget counts all bytes. On a CPU it does not count the model states.
    """
    return without_states(profile) if is_of_cpu(profile) else profile


def is_of_cpu(profile: Profile) -> bool:
    """Return whether ``profile`` describes a CPU."""
    return profile.provenance.device.partition(":")[0] == "cpu"


def carried_bytes(carried: CarryOver, dtype: str) -> dict[str, Any]:
    """Return the fields of LayerCoefficients for ``carried``, the state that later slices need."""
    element, gradient = element_bytes(dtype), summed_bytes(dtype)
    return {
        "kv_bytes_per_token": float(element * carried.channels),
        "kv_gradient_bytes_per_token": float(gradient * carried.channels),
        "border_bytes": float(element * carried.tail + STATE_BYTES * carried.state),
        "border_gradient_bytes": float(gradient * (carried.tail + carried.state)),
    }


def _saved_bytes(layer: Layer, element: int) -> dict[str, Bytes]:
    """Return the bytes that one layer holds from F to B, by recompute mode.

    The K and V of a slice do not count, because they are in the buffer of its document.
    """

    def saved(mode: str) -> Bytes:
        modules = SELECTIVE.get(mode, ())
        dropped = sum(layer.recomputed[n].channels for n in modules if n in layer.recomputed)
        per_token = float(element * (layer.saved - dropped))
        return Bytes(per_token, per_token - float(element * layer.stored_in(mode)))

    kept_before_layer = sum(part.saved for part in layer.before_layer)
    layer_input = float(element * (layer.model.hidden + kept_before_layer))
    every = {mode: saved(mode) for mode in MODES if mode != FULL}
    return {**every, FULL: Bytes(layer_input, layer_input)}


def _recompute_seconds(
    layer: Layer, linear: float, attention: float, launch: float, light: float
) -> dict[str, Seconds]:
    """Return the seconds that one layer adds to B or I, by recompute mode.

    They are 0 for a mode whose modules the layer does not have: such a layer saves everything.
    """

    def of_module(name: str) -> tuple[float, float]:
        again = layer.recomputed.get(name, RecomputedModule())
        tokens = linear * (2 * again.parameters / layer.flops_per_token)
        if again.light:
            tokens += linear * NORM_FRACTION
        return tokens, attention if again.pairs else 0.0

    again = layer.active_parameters - sum(part.parameters for part in layer.before_layer)
    full = linear * (again / layer.active_parameters) + light
    seconds = {KEEP: Seconds(), FULL: Seconds(full, attention, launch)}
    for mode, modules in SELECTIVE.items():
        seconds[mode] = Seconds()
        if any(name in layer.recomputed for name in modules):
            tokens, pairs = zip(*map(of_module, modules), strict=True)
            seconds[mode] = Seconds(sum(tokens), sum(pairs), launch / 4)
    return seconds


def _difference(more: Bytes, less: Bytes) -> Bytes:
    return Bytes(
        max(0.0, more.per_token - less.per_token),
        max(0.0, more.per_cut_token - less.per_cut_token),
    )
