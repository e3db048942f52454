"""Profiles from arithmetic: the papers' constants where they published them, else a device's rates.

The GPT models on A100 follow FlexSP's constants and the assumptions of our study, which rest on
the papers; each stands below where it is used. Other pairs follow flops and bytes, kind of layer by
kind of layer. Assumed of experts: tokens go to all alike, and a chunk's constant is twice a dense
layer's, for the router, the exchanges and the wait that they end with. Of latents: the latent
of a token goes to every device of a stage, K and V are made of a context again block by block, and
the gradient of the up-projection that this leaves is made in B, or in I.
"""

import dataclasses

from megatron_epp.cost.devices import Device
from megatron_epp.cost.models import Layer, Model
from megatron_epp.cost.profile import (
    ANALYTIC,
    LAYER_KIND,
    LETTERS,
    Bytes,
    LayerFigures,
    Profile,
    Provenance,
    Seconds,
    States,
    Workspace,
)
from megatron_epp.cost.published import PUBLISHED, Published
from megatron_epp.ir import FULL, KEEP, SELECTIVE, Kind

ELEMENT_BYTES = 2  # bf16
# A training forward against its backward: linears 1:2, attention 1:2.5 (FlashAttention's two
# passes of two products against five); W is half of the linears' backward, attention has no W.
ATTENTION_BACKWARD = 2.5
LOGITS_BYTES = 6  # of one logit held from F to B: bf16, and float32 for the loss
# LayerNorms and activations move memory only: their recompute is taken as this share of the
# linears' forward.
NORM_SHARE = 0.01
CONTEXT_BLOCK = 2048  # tokens of a context whose K and V are made of latents at a time
# Rows whose logits live at once where the output layer runs early, on a GPU. Each block makes a
# gradient of the whole output weight, which is written, read and added to main_grad: 0.45 ms for
# 32K words, beside 2 ms of products for 1024 rows. So as large blocks as keep to so many logits:
# bf16, with two float32 copies of the loss, they take no more than about 2.5 GiB.
HEAD_BLOCK_TOKENS = (4096, 2048, 1024)
HEAD_BLOCK_LOGITS = 2**28
GRADIENT_BYTES = 4  # of kept K and V: the executor adds their gradients up in float32


def profile(
    model: Model,
    device: Device,
    *,
    b1_divisor: float = 5.0,
    head_seconds: bool | None = None,
    link_seconds: bool | None = None,
    logits_held: bool = True,
    kv_read: bool = False,
) -> Profile:
    """The analytic profile of ``model`` on ``device``, of one layer of every kind on one device.

    b1_divisor    of the published constant per chunk, which was measured across nodes; the
                  pipelines gather inside a node. Calibrated so that gathers and all-to-all take
                  the share of the time that InfiniPipe reports
    head_seconds  whether the last stage's output layer costs time. Default: not for the published
                  constants, whose a2 spreads a head over all layers
    link_seconds  whether messages between stages cost time. Default: not for the published
                  constants, since InfiniPipe takes them as negligible
    logits_held   whether logits live from F to B; else only while F runs, and the output layer's
                  backward with it (layers.early_loss), as training runs it
    kv_read       whether a slice pays for reading the K and V of its context, and for adding up
                  their gradients, beside the pairs. Not with the published constants: their a1
                  was measured on whole documents
    """
    published = PUBLISHED.get(model.name) if device.name.startswith("a100") else None
    if published is not None:
        (layer,) = model.shapes.values()
        figures = {LAYER_KIND: _published_figures(layer, published, b1_divisor)}
        source = (
            f"analytic: FlexSP's published constants, b1 / {b1_divisor:g}; 34 bytes per hidden, "
            "token and layer"
        )
        head_inputs = 0.0  # their a2 spreads a head over all layers
    else:
        figures = {kind: _figures(layer, device, kv_read) for kind, layer in model.shapes.items()}
        source = "analytic: flops and bytes of the device's rates"
        head_inputs = float(ELEMENT_BYTES * (model.hidden + model.vocabulary))
    head = published is None if head_seconds is None else head_seconds
    links = published is None if link_seconds is None else link_seconds
    head_token = 2.0 * model.vocabulary_parameters / device.linear_flops if head else 0.0
    logits = Bytes(LOGITS_BYTES * model.vocabulary, LOGITS_BYTES * model.vocabulary)
    none = {kind: Workspace() for kind in Kind if kind in _COMPUTE}
    boundary = ELEMENT_BYTES * model.hidden
    (first, its), *others = figures.items()
    of_first = {field.name: getattr(its, field.name) for field in dataclasses.fields(LayerFigures)}
    return Profile(
        provenance=Provenance(model.name, device.name, "bf16", "2026-11-21", source, ANALYTIC),
        tp=1,
        cp=1,
        **of_first,
        first_seconds={kind: Seconds() for kind in _COMPUTE},
        last_seconds={
            kind: Seconds(share * head_token)
            for kind, share in zip(
                _COMPUTE, (1, 2, 1, 1) if logits_held else (3, 0, 0, 0), strict=True
            )
        },
        first_bytes=Bytes(),
        last_bytes=logits if logits_held else Bytes(),
        keeps_last=False,
        last_weight_input_bytes=Bytes(head_inputs, head_inputs) if logits_held else Bytes(),
        last_workspace_bytes=none
        if logits_held
        else {**none, Kind.FORWARD: Workspace(logits.per_token, logits.per_cut_token)},
        last_workspace_tokens=0.0,
        all_to_all_bytes_per_second=dict(device.group_bytes_per_second),
        tensor_bytes_per_second=dict(device.group_bytes_per_second),
        link_seconds_per_token=boundary / device.link_bytes_per_second if links else 0.0,
        link_latency_seconds=device.link_latency_seconds if links else 0.0,
        first_parameters=model.vocabulary_parameters,
        last_parameters=model.vocabulary_parameters,
        states=STATES,
        host_bytes_per_second=device.host_bytes_per_second,
        layer_kind=first,
        other_kinds=dict(others),
    )


def head_block_tokens(words: int) -> int:
    """Rows that an early output layer of so many words takes at a time."""
    fitting = (rows for rows in HEAD_BLOCK_TOKENS if rows * words <= HEAD_BLOCK_LOGITS)
    return next(fitting, HEAD_BLOCK_TOKENS[-1])


def _published_figures(layer: Layer, published: Published, b1_divisor: float) -> LayerFigures:
    linear, attention, gather = _published_rates(layer.model, published, b1_divisor)
    # Published for 7B; the published figures of 13B and 30B cannot be without checkpointing.
    kept = 34.0 * layer.model.hidden
    # A chunk's activations stay whole until its W: the linears' inputs, and gradients in the place
    # of what else was saved (32 of 34 bytes). What launches cost is in a2.
    made = _layer(layer, linear, attention, 0.0, gather, kept, kept)
    return dataclasses.replace(
        made,
        # The papers charge K/V gradients like K and V.
        kv_gradient_bytes_per_token=float(ELEMENT_BYTES * layer.carried_hidden),
        # The study does not charge the one layer that lives again; elsewhere it is charged.
        recompute_workspace_bytes={letter: Bytes() for letter in LETTERS},
    )


def _kv_read_seconds(layer: Layer, device: Device) -> dict[Kind, float]:
    """Per token of context: what its K and V take to read, and in backward to read again, with
    their gradients written, read and added to those in the store.

    A kernel's blocks of queries share what they read through the cache, so it comes from memory
    about once, whatever the slice's length: that is what FlashAttention-3's table fits
    (tests/cost/test_published_attention.py). What a window sees of it is part of its pairs.
    """
    rate = device.memory_bytes_per_second
    if not rate or layer.shape.window or not layer.carried_hidden:
        return {}
    forward = ELEMENT_BYTES * layer.carried_hidden / rate
    again = 3 * ELEMENT_BYTES + 2 * GRADIENT_BYTES  # K and V, their gradients twice, the store's
    backward = again * layer.carried_hidden / rate
    return {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward,
        Kind.INPUT: backward,
        Kind.WEIGHT: 0.0,
    }


def _figures(layer: Layer, device: Device, kv_read: bool) -> LayerFigures:
    """Figures of one layer, by flops and bytes."""
    linear = layer.flops_per_token / device.linear_flops
    attention = layer.flops_per_pair / device.attention_flops
    # ZeRO 3 gathers a layer's weights in F and B and scatters its gradients in B.
    weights = ELEMENT_BYTES * (layer.parameters + layer.expert_parameters)
    gather = 3 * weights / device.group_bytes_per_second[min(device.group_bytes_per_second)]
    launch = device.launch_seconds * (2 if layer.shape.experts else 1)
    made = _layer(
        layer, linear, attention, launch, gather, _kept_bytes(layer), _weight_input_bytes(layer)
    )
    read = _kv_read_seconds(layer, device) if kv_read else {}
    if not layer.carries_latents:
        return dataclasses.replace(made, context_seconds=read)
    again = layer.flops_per_context_token / device.linear_flops
    expanded = float(ELEMENT_BYTES * (layer.key_hidden + layer.value_hidden))
    in_forward = Workspace(per_op=CONTEXT_BLOCK * expanded)
    # With gradients of K and V, and those of the context's latents.
    in_backward = Workspace(
        per_context_token=float(ELEMENT_BYTES * layer.carried_hidden),
        per_op=2 * CONTEXT_BLOCK * expanded,
    )
    return dataclasses.replace(
        made,
        context_seconds={
            # Backward makes them again, and has the gradients of latents and of weights to make.
            Kind.FORWARD: again + read.get(Kind.FORWARD, 0.0),
            Kind.BACKWARD: 3 * again + read.get(Kind.BACKWARD, 0.0),
            Kind.INPUT: 3 * again + read.get(Kind.INPUT, 0.0),
            Kind.WEIGHT: 0.0,
        },
        workspace_bytes={
            **made.workspace_bytes,
            Kind.FORWARD: in_forward,
            Kind.BACKWARD: in_backward,
            Kind.INPUT: in_backward,
        },
        kv_replicated=True,
    )


def _layer(
    layer: Layer,
    linear: float,
    attention: float,
    launch: float,
    gather: float,
    kept: float,
    weight_inputs: float,
) -> LayerFigures:
    """From forward seconds per token, per pair and per chunk, seconds of ZeRO 3's gathers, and
    bytes per token from F to B and from I to W."""
    saved = _saved_bytes(layer, kept)
    return LayerFigures(
        layer_seconds={
            Kind.FORWARD: Seconds(linear, attention, launch),
            Kind.BACKWARD: Seconds(2 * linear, ATTENTION_BACKWARD * attention, 2 * launch),
            Kind.INPUT: Seconds(linear, ATTENTION_BACKWARD * attention, launch),
            Kind.WEIGHT: Seconds(linear, 0.0, launch),
        },
        recompute_seconds=_recompute_seconds(layer, linear, attention, launch),
        gather_seconds={
            Kind.FORWARD: gather / 3,
            Kind.BACKWARD: 2 * gather / 3,
            Kind.INPUT: gather / 3,
            Kind.WEIGHT: gather / 3,
        },
        saved_bytes=saved,
        kv_bytes_per_token=float(ELEMENT_BYTES * layer.carried_hidden),
        kv_gradient_bytes_per_token=float(GRADIENT_BYTES * layer.carried_hidden),
        weight_input_bytes=Bytes(weight_inputs, weight_inputs),
        workspace_bytes={kind: Workspace() for kind in _COMPUTE},
        recompute_workspace_bytes={
            letter: _difference(saved[KEEP], saved[letter]) for letter in LETTERS
        },
        # Q, K, V to heads and the output back: eq. 3; latents besides.
        all_to_all_bytes_per_token=float(
            ELEMENT_BYTES
            * (
                layer.query_hidden
                + layer.key_hidden
                + layer.value_hidden
                + layer.output_hidden
                + (layer.carried_hidden if layer.carries_latents else 0)
            )
        ),
        tensor_bytes_per_token=_tensor_bytes(layer),
        layer_parameters=layer.parameters,
        window=layer.shape.window,
        # There and back.
        expert_bytes_per_token=2.0
        * ELEMENT_BYTES
        * layer.shape.active_experts
        * layer.model.hidden,
        expert_parameters=float(layer.expert_parameters),
    )


def _tensor_bytes(layer: Layer) -> float:
    """A gather and a scatter of the hidden state around attention, and around an MLP whose matrices
    are spread; experts get rows as they lie."""
    parts = layer.shape.attention + (layer.dense_hidden > 0)
    return 2.0 * parts * ELEMENT_BYTES * layer.model.hidden


_COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
# bf16 weights and float32 gradients on every device, float32 master weights and Adam's two moments
# sharded: Megatron's distributed optimizer. ZeRO 3: FlexSP's 16 bytes per parameter, and buffers
# of three gathered layers.
STATES = States(
    zero1_resident=6.0,
    zero1_sharded=12.0,
    zero3_sharded=16.0,
    zero3_gathered=float(ELEMENT_BYTES),
    zero3_layers=3.0,
)


def without_states(measured: Profile) -> Profile:
    """``measured`` for a budget that covers activations only, as on CPU hosts."""
    return dataclasses.replace(measured, states=States(0.0, 0.0, 0.0, 0.0, 0.0))


def budgeted(profile: Profile) -> Profile:
    """``profile`` with what a budget covers in training: all, but on a CPU only what chunks
    hold."""
    on_cpu = profile.provenance.device.partition(":")[0] == "cpu"
    return without_states(profile) if on_cpu else profile


def _published_rates(
    model: Model, published: Published, b1_divisor: float
) -> tuple[float, float, float]:
    """(forward seconds per token, per pair, gather seconds) of one layer on one device.

    a1 * s^2 = 2 * a1 * pairs - a1 * s, as a document of s tokens has s * (s + 1) / 2 pairs: the
    linear share gives that token's worth back, so that eq. 1 holds to the last bit.
    """
    millisecond = 1e-3 / model.layers
    a1 = published.a1_ms_per_square_token * millisecond
    a2 = published.a2_ms_per_token * millisecond
    attention = 2 * a1 / (1 + ATTENTION_BACKWARD)
    return (a2 - a1) / 3, attention, published.b1_ms * millisecond / b1_divisor


def _mlp_inside(layer: Layer) -> int:
    """Channels that the MLP saves of a token, its norm apart: the insides of a dense or shared one,
    of the experts their inputs, too."""
    shape = layer.shape
    experts = shape.active_experts * (layer.model.hidden + shape.expert_hidden * layer.matrices)
    return layer.dense_hidden * layer.matrices + experts + shape.experts


def _kept_bytes(layer: Layer) -> float:
    """One layer saves, per token: norm inputs, linear inputs, Q, K, V, latents and the output of
    attention, and the MLP's insides."""
    elements = (
        2 * layer.norms * layer.model.hidden  # norms' inputs and outputs
        + layer.query_hidden
        + layer.output_hidden
        + layer.key_hidden
        + layer.value_hidden
        + 2 * (layer.shape.query_rank + layer.shape.kv_rank)  # before and behind their norms
        + layer.shape.rotary_size
        + _mlp_inside(layer)
    )
    return float(ELEMENT_BYTES * elements)


def _weight_input_bytes(layer: Layer) -> float:
    """One layer's linears, per token: their inputs, and the gradients of their outputs."""
    shape, hidden = layer.shape, layer.model.hidden
    gates = layer.matrices - 1  # outputs of an MLP's first product, in its hidden size
    inputs = layer.norms * hidden + layer.output_hidden + layer.dense_hidden
    gradients = layer.norms * hidden + layer.query_hidden + layer.dense_hidden * gates
    if layer.latent:
        ranks = shape.query_rank + shape.kv_rank
        inputs += ranks
        gradients += ranks + shape.rotary_size
        gradients += layer.model.heads * layer.model.head_size + layer.value_hidden
    else:
        gradients += layer.key_hidden + layer.value_hidden
    inputs += shape.active_experts * (hidden + shape.expert_hidden)
    gradients += shape.active_experts * (hidden + shape.expert_hidden * gates) + shape.experts
    return float(ELEMENT_BYTES * (inputs + gradients))


def _saved_bytes(layer: Layer, kept: float) -> dict[str, Bytes]:
    """Bytes of one layer from F to B, by recompute letter.

    Recomputing attention saves next to nothing with flash kernels: Q, K, V and the output stay as
    inputs of what is not recomputed. The K and V of a slice lie in its document's buffer; of a
    window's the tail is a copy, and so are latents.
    """
    copied = layer.shape.window or layer.carries_latents
    kv = 0.0 if copied else float(ELEMENT_BYTES * layer.carried_hidden)
    module = {
        "core_attn": 0.0,
        "mla_up_proj": _expanded_bytes(layer),
        "moe_act": float(ELEMENT_BYTES * layer.shape.active_experts * layer.shape.expert_hidden),
        "mlp": float(ELEMENT_BYTES * _mlp_inside(layer)),
        "layernorm": float(ELEMENT_BYTES * layer.norms * layer.model.hidden),
    }
    saved = {
        letter: kept - sum(module[name] for name in modules)
        for letter, modules in {KEEP: (), **SELECTIVE}.items()
    }
    layer_input = float(ELEMENT_BYTES * layer.model.hidden)
    return {
        letter: Bytes(layer_input, layer_input)
        if letter == FULL
        else Bytes(saved[letter], saved[letter] - (0.0 if _without_kv(layer, letter) else kv))
        for letter in LETTERS
    }


def _expanded_bytes(layer: Layer) -> float:
    """Q, K and V, of a token's latents."""
    if not layer.latent:
        return 0.0
    return float(ELEMENT_BYTES * (layer.query_hidden + layer.key_hidden + layer.value_hidden))


def _without_kv(layer: Layer, letter: str) -> bool:
    return layer.latent and "mla_up_proj" in SELECTIVE.get(letter, ())


def _recompute_seconds(
    layer: Layer, linear: float, attention: float, launch: float
) -> dict[str, Seconds]:
    mlp = layer.active_mlp_parameters / layer.active_parameters
    module = {
        "core_attn": (0.0, attention),
        "mlp": (linear * mlp, 0.0),
        "mla_up_proj": (linear * layer.up_parameters / layer.active_parameters, 0.0),
        "moe_act": (linear * NORM_SHARE, 0.0),
        "layernorm": (linear * NORM_SHARE, 0.0),
    }
    lacks = {
        "core_attn": not layer.shape.attention,
        "mlp": not layer.shape.mlp,
        "mla_up_proj": not layer.latent,
        "moe_act": not layer.shape.experts,
    }
    seconds = {KEEP: Seconds(), FULL: Seconds(linear, attention, launch)}
    for letter, modules in SELECTIVE.items():
        if all(lacks.get(name, False) for name in modules):
            seconds[letter] = Seconds()  # it has no such module, and keeps everything
            continue
        tokens, pairs = zip(*(module[name] for name in modules), strict=True)
        seconds[letter] = Seconds(sum(tokens), sum(pairs), launch / 4)
    return seconds


def _difference(more: Bytes, less: Bytes) -> Bytes:
    return Bytes(
        max(0.0, more.per_token - less.per_token),
        max(0.0, more.per_cut_token - less.per_cut_token),
    )
