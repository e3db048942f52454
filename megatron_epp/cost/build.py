"""Construction of a Cost from the names of a model and a device, with a default layout."""

import dataclasses
from collections.abc import Sequence
from math import gcd
from typing import Any

from megatron_epp.cost.analytic import budgeted, head_block_tokens
from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.catalogue.devices import GIB, device
from megatron_epp.cost.catalogue.models import Model, model
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.network.topology import FLAT, Network, Topology
from megatron_epp.cost.network.topology import topology as find_topology
from megatron_epp.cost.profile import ALLTOALL, Profile
from megatron_epp.ir import Kind


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, with ``layers`` divided evenly.

    If there is a remainder, the first stages get one more layer each, because the last stage has
    the LM head.

    Raises:
        ValueError: ``stages`` is not between 1 and ``layers``.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"pp {stages}: expected 1 to {layers}, the layers of the model")
    per_stage, rest = divmod(layers, stages)
    return tuple(per_stage + (stage < rest) for stage in range(stages))


def named_cost(
    model_name: str | Model,
    device_name: str,
    *,
    pp: int,
    tp: int = 1,
    cp: int = 1,
    dp: int = 1,
    zero: int = 1,
    memory_budget_gib: float | None = None,
    layers: Sequence[int] | None = None,
    ep: int | None = None,
    layer_kinds: Sequence[str] = (),
    profile: Profile | None = None,
    topology: str | Topology = FLAT,
    vocabulary_parallel: bool = False,
    place: tuple[int, ...] = (),
    stacked_experts: bool = False,
    **assumptions: Any,
) -> Cost:
    """Return the cost of a model on devices; both are given by name or file.

    Args:
        model_name: name or file of a model, or the model itself.
        device_name: name or file of a device.
        pp: number of stages.
        tp: tensor-parallel size.
        cp: context-parallel size.
        dp: data-parallel size.
        zero: ZeRO stage: 1 or 3; 3 is for estimates only, as --epp does not support it.
        memory_budget_gib: budget of each device in GiB; default: budget_gib of the device.
        layers: number of layers of each stage; default: as :func:`even_layers`.
        ep: expert-parallel size; default: as :func:`expert_degree`.
        layer_kinds: kind of each layer, by its name in ``profile``; default: the model's kinds.
        profile: measured profile; default: the analytic profile.
        topology: name or file of a topology for an analytic profile; a measured profile contains
            the rates of its groups.
        vocabulary_parallel: whether the LM head is sharded over the stages.
        place: rank of each stage; empty if stage i is on rank i.
        stacked_experts: whether one matrix product computes a linear of all experts of a rank. It
            has no effect if tokens are sent to experts by DeepEP or HybridEP (``flex``).
        **assumptions: arguments of :func:`megatron_epp.cost.analytic.profile`.

    Raises:
        ValueError: a name is unknown or its file invalid, the parallel sizes or layers do not fit
            the model, or model states exceed a budget.

    Example:
        >>> cost = named_cost("gpt-7b", "a100-80g", pp=2, cp=8)
        >>> cost.layout.layers
        (16, 16)
    """
    the_model = model(model_name) if isinstance(model_name, str) else model_name
    if cp > 1 and not all(layer.cp for layer in the_model.shapes.values()):
        raise ValueError(f"cp {cp}: expected 1, as the model has sparse attention; use tp or pp")
    mtp_layers = the_model.mtp_layers_count
    if layers is None:
        *others, last = even_layers(the_model.layers - mtp_layers, pp)
        stage_layers = (*others, last + mtp_layers)
    else:
        stage_layers = tuple(layers)
    if len(stage_layers) != pp or sum(stage_layers) != the_model.layers:
        raise ValueError(
            f"layers {' '.join(map(str, stage_layers))}: expected {pp} numbers that add up to "
            f"{the_model.layers}"
        )
    if mtp_layers and mtp_layers >= stage_layers[-1]:
        raise ValueError(
            f"layers {' '.join(map(str, stage_layers))}: the last {mtp_layers} are MTP layers, "
            "which lie on the last stage after at least one other layer"
        )
    the_device = device(device_name)
    ranks = 1 + max(place) if place else pp
    network: Network | None = None
    if profile is None:
        profile = analytic_profile(the_model, the_device, **assumptions)
        fused = not profile.last_bytes.per_token
        if fused and profile.last_workspace_bytes[Kind.FORWARD].per_token:
            block_tokens = float(head_block_tokens(the_model.vocabulary // tp) * cp)
            profile = dataclasses.replace(profile, last_workspace_tokens=block_tokens)
        joined = find_topology(topology) if isinstance(topology, str) else topology
        network = None if joined is None else Network.of(joined, the_device)
        if network is not None and profile.link_seconds_per_token:
            boundary = profile.link_seconds_per_token * the_device.link_bytes_per_second
            rate = network.to_neighbour(tp * cp, dp, ranks)
            profile = dataclasses.replace(profile, link_seconds_per_token=boundary / rate)
    budget = the_device.budget_bytes if memory_budget_gib is None else memory_budget_gib * GIB
    budgets = (budget,) * ranks
    kinds = tuple(layer_kinds) or the_model.layer_kinds
    if not layer_kinds and len(profile.kinds) == 1:
        kinds = ()  # measured before there were kinds, or of one kind with another name
    layout = StageLayout(
        budgeted(profile),
        stage_layers,
        tp,
        cp,
        dp,
        zero,
        expert_degree(ep, tp, cp, the_model.most_experts, dp),
        kinds,
        network=network,
        vocabulary_parallel=vocabulary_parallel,
        place=place,
        stacked_experts=stacked_experts and profile.token_dispatcher == ALLTOALL,
    )
    cost = Cost(layout, budgets)
    cost.require_states_fit()
    return cost


def expert_degree(ep: int | None, tp: int, cp: int, experts: int | None, dp: int = 1) -> int:
    """Return the expert-parallel size: ``ep``, or the default if it is None.

    Args:
        ep: requested size; None: the greatest common divisor of tp * cp and ``experts``. A size
            above tp * cp shards experts over all devices of several replicas.
        tp: tensor-parallel size.
        cp: context-parallel size.
        experts: number of experts of a layer; 0: the default is 1; None: the number is unknown,
            and the default is tp * cp.
        dp: data-parallel size.

    Raises:
        ValueError: ``ep`` does not fit the other parallel sizes or the number of experts.
    """
    if ep is None:
        return tp * cp if experts is None else gcd(tp * cp, experts) if experts else 1
    if ep > 1 and experts == 0:
        raise ValueError(f"ep {ep}: the model has no experts; leave it out")
    if (tp * cp) % ep and (ep % (tp * cp) or dp % (ep // (tp * cp))):
        raise ValueError(
            f"ep {ep}: expected a divisor of tp x cp, {tp * cp}, or a multiple of it whose share "
            f"divides dp, {dp}"
        )
    if experts and experts % ep:
        raise ValueError(f"ep {ep}: expected a divisor of the {experts} experts")
    return ep
