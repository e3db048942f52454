"""Profiles from arithmetic: the papers' constants where they published them, else a device's rates.

The GPT models on A100 follow FlexSP's constants and the assumptions of our study, which rest on
the papers; each stands below where it is used. Other pairs follow flops and bytes.
"""

import dataclasses

from megatron_epp.cost.devices import Device
from megatron_epp.cost.models import Model
from megatron_epp.cost.profile import (
    LETTERS,
    Bytes,
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
# LayerNorms move memory only; their recompute is taken as this share of the linears' forward.
NORM_SHARE = 0.01


def profile(
    model: Model,
    device: Device,
    *,
    b1_divisor: float = 5.0,
    head_seconds: bool | None = None,
    link_seconds: bool | None = None,
    logits_held: bool = True,
) -> Profile:
    """The analytic profile of ``model`` on ``device``, of one layer on one device.

    b1_divisor    of the published constant per chunk, which was measured across nodes; the
                  pipelines gather inside a node. Calibrated so that gathers and all-to-all take
                  the share of the time that InfiniPipe reports
    head_seconds  whether the last stage's output layer costs time. Default: not for the published
                  constants, whose a2 spreads a head over all layers
    link_seconds  whether messages between stages cost time. Default: not for the published
                  constants, since InfiniPipe takes them as negligible
    logits_held   whether logits live from F to B; else only while F runs, and the output layer's
                  backward with it (layers.early_loss)
    """
    published = PUBLISHED.get(model.name) if device.name.startswith("a100") else None
    if published is not None:
        linear, attention, gather = _published_rates(model, published, b1_divisor)
        launch = 0.0  # in a2
        source = (
            f"analytic: FlexSP's published constants, b1 / {b1_divisor:g}; 34 bytes per hidden, "
            "token and layer"
        )
        # Published for 7B; the published figures of 13B and 30B cannot be without checkpointing.
        kept = 34.0 * model.hidden
        # A chunk's activations stay whole until its W: the linears' inputs, and gradients in the
        # place of what else was saved (32 of 34 bytes). Their a2 spreads a head over all layers.
        weight_inputs, head_inputs = kept, 0.0
    else:
        linear = model.layer_flops_per_token / device.linear_flops
        attention = model.layer_flops_per_pair / device.attention_flops
        # ZeRO 3 gathers a layer's weights in F and B and scatters its gradients in B.
        weights = ELEMENT_BYTES * model.layer_parameters
        gather = 3 * weights / device.group_bytes_per_second[min(device.group_bytes_per_second)]
        launch = device.launch_seconds
        source = "analytic: flops and bytes of the device's rates"
        kept = _kept_bytes(model)
        weight_inputs = _weight_input_bytes(model)
        head_inputs = float(ELEMENT_BYTES * (model.hidden + model.vocabulary))
    head = published is None if head_seconds is None else head_seconds
    links = published is None if link_seconds is None else link_seconds
    saved = _saved_bytes(model, kept)
    head_token = 2.0 * model.vocabulary_parameters / device.linear_flops if head else 0.0
    logits = Bytes(LOGITS_BYTES * model.vocabulary, LOGITS_BYTES * model.vocabulary)
    none = {kind: Workspace() for kind in Kind if kind in _COMPUTE}
    boundary = ELEMENT_BYTES * model.hidden
    return Profile(
        provenance=Provenance(model.name, device.name, "bf16", "2026-11-21", source),
        tp=1,
        cp=1,
        layer_seconds={
            Kind.FORWARD: Seconds(linear, attention, launch),
            Kind.BACKWARD: Seconds(2 * linear, ATTENTION_BACKWARD * attention, 2 * launch),
            Kind.INPUT: Seconds(linear, ATTENTION_BACKWARD * attention, launch),
            Kind.WEIGHT: Seconds(linear, 0.0, launch),
        },
        first_seconds={kind: Seconds() for kind in _COMPUTE},
        last_seconds={
            kind: Seconds(share * head_token)
            for kind, share in zip(
                _COMPUTE, (1, 2, 1, 1) if logits_held else (3, 0, 0, 0), strict=True
            )
        },
        recompute_seconds=_recompute_seconds(model, linear, attention, launch),
        gather_seconds={
            Kind.FORWARD: gather / 3,
            Kind.BACKWARD: 2 * gather / 3,
            Kind.INPUT: gather / 3,
            Kind.WEIGHT: gather / 3,
        },
        saved_bytes=saved,
        first_bytes=Bytes(),
        last_bytes=logits if logits_held else Bytes(),
        kv_bytes_per_token=2.0 * ELEMENT_BYTES * model.kv_hidden,
        keeps_last=False,
        # The papers charge K/V gradients like K and V; the executor adds them up in float32.
        kv_gradient_bytes_per_token=2.0
        * (ELEMENT_BYTES if published is not None else 4)
        * model.kv_hidden,
        weight_input_bytes=Bytes(weight_inputs, weight_inputs),
        last_weight_input_bytes=Bytes(head_inputs, head_inputs) if logits_held else Bytes(),
        workspace_bytes=none,
        last_workspace_bytes=none
        if logits_held
        else {**none, Kind.FORWARD: Workspace(logits.per_token, logits.per_cut_token)},
        last_workspace_tokens=0.0,
        # The study does not charge the one layer that lives again; elsewhere it is charged.
        recompute_workspace_bytes={letter: Bytes() for letter in LETTERS}
        if published is not None
        else {letter: _difference(saved[KEEP], saved[letter]) for letter in LETTERS},
        # Q, K, V to heads and the output back: eq. 3.
        all_to_all_bytes_per_token=2.0 * ELEMENT_BYTES * (model.query_hidden + model.kv_hidden),
        all_to_all_bytes_per_second=dict(device.group_bytes_per_second),
        # Two gathers and two scatters of the hidden state.
        tensor_bytes_per_token=4.0 * ELEMENT_BYTES * model.hidden,
        tensor_bytes_per_second=dict(device.group_bytes_per_second),
        link_seconds_per_token=boundary / device.link_bytes_per_second if links else 0.0,
        link_latency_seconds=device.link_latency_seconds if links else 0.0,
        layer_parameters=model.layer_parameters,
        first_parameters=model.vocabulary_parameters,
        last_parameters=model.vocabulary_parameters,
        states=STATES,
        host_bytes_per_second=device.host_bytes_per_second,
    )


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
    """What a budget covers, as in training: everything, but on a CPU only what chunks hold."""
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


def _kept_bytes(model: Model) -> float:
    """One layer saves, per token: norm inputs, linear inputs, Q, K, V, and the MLP's insides."""
    elements = (
        4 * model.hidden  # both norms' inputs and outputs
        + 2 * model.query_hidden  # Q; attention's output
        + 2 * model.kv_hidden
        + model.ffn_hidden * (3 if model.gated else 2)
    )
    return float(ELEMENT_BYTES * elements)


def _weight_input_bytes(model: Model) -> float:
    """One layer's linears, per token: their inputs, and the gradients of their outputs."""
    inputs = 2 * model.hidden + model.query_hidden + model.ffn_hidden
    gradients = 2 * model.hidden + model.query_hidden + 2 * model.kv_hidden
    gradients += model.ffn_hidden * (2 if model.gated else 1)
    return float(ELEMENT_BYTES * (inputs + gradients))


def _saved_bytes(model: Model, kept: float) -> dict[str, Bytes]:
    """Bytes of one layer from F to B, by recompute letter.

    Recomputing attention saves next to nothing with flash kernels: Q, K, V and the output stay as
    inputs of what is not recomputed. The K and V of a slice lie in its document's buffer.
    """
    kv = 2.0 * ELEMENT_BYTES * model.kv_hidden
    module = {
        "core_attn": 0.0,
        "mlp": float(ELEMENT_BYTES * model.ffn_hidden * (3 if model.gated else 2)),
        "layernorm": 2.0 * ELEMENT_BYTES * model.hidden,
    }
    saved = {
        letter: kept - sum(module[name] for name in modules)
        for letter, modules in {KEEP: (), **SELECTIVE}.items()
    }
    layer_input = float(ELEMENT_BYTES * model.hidden)
    return {
        letter: Bytes(layer_input, layer_input)
        if letter == FULL
        else Bytes(saved[letter], saved[letter] - kv)
        for letter in LETTERS
    }


def _recompute_seconds(
    model: Model, linear: float, attention: float, launch: float
) -> dict[str, Seconds]:
    mlp = model.hidden * model.ffn_hidden * (3 if model.gated else 2) / model.layer_parameters
    module = {
        "core_attn": (0.0, attention),
        "mlp": (linear * mlp, 0.0),
        "layernorm": (linear * NORM_SHARE, 0.0),
    }
    seconds = {KEEP: Seconds(), FULL: Seconds(linear, attention, launch)}
    for letter, modules in SELECTIVE.items():
        tokens, pairs = zip(*(module[name] for name in modules), strict=True)
        seconds[letter] = Seconds(sum(tokens), sum(pairs), launch / 4)
    return seconds


def _difference(more: Bytes, less: Bytes) -> Bytes:
    return Bytes(
        max(0.0, more.per_token - less.per_token),
        max(0.0, more.per_cut_token - less.per_cut_token),
    )
