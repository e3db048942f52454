"""Construction of a Cost from the names of a model and a device, with a default layout."""

import dataclasses
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from megatron_epp.cost.analytic import budgeted, head_block_tokens, is_of_cpu
from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.catalogue.devices import GIB, Device, devices_of
from megatron_epp.cost.catalogue.models import Model, model
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import RankDevice, StageLayout
from megatron_epp.cost.network.topology import FLAT, Network, Topology
from megatron_epp.cost.network.topology import topology as find_topology
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Kind

# Models that FlexSP and InfiniPipe train with ZeRO 3.
ZERO_3 = ("gpt-7b", "gpt-13b", "gpt-30b")


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, with ``layers`` divided evenly.

    If there is a remainder, the first stages get one more layer each, because the last stage has
    the LM head.
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
    zero: int | None = None,
    memory_budget_gib: float | None = None,
    layers: Sequence[int] | None = None,
    ep: int | None = None,
    layer_kinds: Sequence[str] = (),
    profile: Profile | None = None,
    topology: str | Topology = FLAT,
    vocabulary_parallel: bool = False,
    place: tuple[int, ...] = (),
    **assumptions: Any,
) -> Cost:
    """Return the cost of a model on devices; both are given by name or file.

    Devices may differ by pipeline rank, as in ``h100-80g*4,a100-80g*4``. Each device has its own
    rates and budget. A message takes as long as on the slower of its two devices; its latency
    is the largest of all devices. Reading K and V then takes time only if the memory rate of every
    device is known.

    Args:
        model_name: name or file of a model, or the model itself.
        device_name: name or file of a device, or one per pipeline rank.
        pp: number of stages.
        tp: tensor-parallel size.
        cp: context-parallel size.
        dp: data-parallel size.
        zero: ZeRO stage; default: 3 for gpt-7b, gpt-13b and gpt-30b, otherwise 1.
        memory_budget_gib: budget of each device in GiB; default: budget_gib of the device.
        layers: number of layers of each stage; default: as :func:`even_layers`.
        ep: expert-parallel size; default: gcd of tp * cp and the number of experts, or 1.
        layer_kinds: kind of each layer, by its name in ``profile``; default: the model's kinds.
        profile: measured profile; default: the analytic profile.
        topology: name or file of a topology for an analytic profile; a measured profile contains
            the rates of its groups.
        vocabulary_parallel: whether the LM head is sharded over the stages.
        place: rank of each stage; empty if stage i is on rank i.
        **assumptions: arguments of :func:`megatron_epp.cost.analytic.profile`.

    Raises:
        ValueError: the parallel sizes or layers do not fit the model, or model states exceed a
            budget.

    Example:
        >>> cost = named_cost("gpt-7b", "a100-80g", pp=2, cp=8)
        >>> cost.layout.layers
        (16, 16)
    """
    the_model = model(model_name) if isinstance(model_name, str) else model_name
    if zero is None:
        zero = 3 if the_model.name in ZERO_3 else 1
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
            f"layers {' '.join(map(str, stage_layers))}: the last {mtp_layers} predict further "
            "tokens and lie on the last stage, with one in front of them or more"
        )
    devices = devices_of(device_name, 1 + max(place) if place else pp)
    network: Network | None = None
    rank_devices: tuple[RankDevice, ...] = ()
    if profile is None:
        joined = find_topology(topology) if isinstance(topology, str) else topology
        different = {each.name: each for each in devices}
        _require_one_sort(devices)
        if len(different) > 1 and any(not each.memory_bytes_per_second for each in devices):
            assumptions["kv_read"] = False
        costs = {
            name: _on_device(the_model, each, joined, (tp, cp, dp, pp), assumptions)
            for name, each in different.items()
        }
        profile, network = costs[devices[0].name].profile, costs[devices[0].name].network
        if len(different) > 1:
            rank_devices = tuple(costs[each.name] for each in devices)
            profile = _of_all(device_name, [each.profile for each in costs.values()])
    budgets = tuple(
        each.budget_bytes if memory_budget_gib is None else memory_budget_gib * GIB
        for each in devices
    )
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
        rank_devices=rank_devices,
    )
    cost = Cost(layout, budgets)
    cost.require_states_fit()
    return cost


def _on_device(
    the_model: Model,
    device: Device,
    joined: Topology | None,
    degrees: tuple[int, int, int, int],
    assumptions: Mapping[str, Any],
) -> RankDevice:
    """Return the analytic profile of one device, and its network; ``degrees``: tp, cp, dp, pp."""
    tp, cp, dp, pp = degrees
    profile = analytic_profile(the_model, device, **assumptions)
    profile = _with_blocks(profile, the_model.vocabulary // tp, cp)
    if joined is None:
        return RankDevice(profile)
    network = Network.of(joined, device)
    if profile.link_seconds_per_token:
        boundary = profile.link_seconds_per_token * device.link_bytes_per_second
        rate = network.to_neighbour(tp * cp, dp, pp)
        profile = dataclasses.replace(profile, link_seconds_per_token=boundary / rate)
    return RankDevice(profile, network)


def _require_one_sort(devices: Sequence[Device]) -> None:
    """Raise a ValueError if different devices share a name, or if CPUs and GPUs are mixed.

    Memory budgets of CPUs and GPUs have different meanings.
    """
    for each in devices:
        if any(each.name == other.name and each != other for other in devices):
            raise ValueError(
                f"devices {each.name!r} of the pipeline differ; expected a name for each of them"
            )
    if len({each.name.partition(":")[0] == "cpu" for each in devices}) > 1:
        raise ValueError("a pipeline over CPUs and GPUs: expected the one or the other")


def _of_all(name: str, profiles: Sequence[Profile]) -> Profile:
    """Return one profile for all devices, with their largest latency and lowest host rate.

    Other coefficients, such as bytes, are those of the first device. Offload is not
    available if the rate to host memory is unknown for one of the devices.
    """
    first = profiles[0]
    sort = "cpu:" if is_of_cpu(first) else ""
    return dataclasses.replace(
        first,
        provenance=dataclasses.replace(first.provenance, device=f"{sort}{name}"),
        link_latency_seconds=max(each.link_latency_seconds for each in profiles),
        host_bytes_per_second=min(each.host_bytes_per_second for each in profiles),
    )


def _with_blocks(profile: Profile, words: int, cp: int) -> Profile:
    """Return ``profile`` with the block size of its LM head, if it has a fused LM head."""
    if profile.last_bytes.per_token or not profile.last_workspace_bytes[Kind.FORWARD].per_token:
        return profile
    return dataclasses.replace(profile, last_workspace_tokens=float(head_block_tokens(words) * cp))


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
