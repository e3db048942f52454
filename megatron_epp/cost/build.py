"""Costs by the names of a model and a device, and the defaults of a layout."""

import dataclasses
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from megatron_epp.cost.analytic import budgeted, head_block_tokens, is_of_cpu
from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.catalogue.devices import GIB, Device, devices_of
from megatron_epp.cost.catalogue.models import Model, model
from megatron_epp.cost.catalogue.published import PUBLISHED
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import RankDevice, StageLayout
from megatron_epp.cost.network.topology import FLAT, Network, Topology
from megatron_epp.cost.network.topology import topology as find_topology
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Kind


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """``layers`` over ``stages``; what is left over goes one each to the first stages, as the
    last one carries the output layer."""
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
    """The cost of a model on devices, both by name or file, or a model as it is.

    Defaults: the device's own budget; even layers; zero 3 for the GPT models of the papers, else
    1; experts shared by as many of a stage's devices as their number allows; an analytic profile,
    to which ``assumptions`` go (:func:`analytic.profile`). ``layer_kinds``: of all layers, as a
    ``profile`` calls them, where the model does not say. ``topology``: by name or file, of an
    analytic profile; a measured one has its own groups' rates. ``vocabulary_parallel``: the output
    layer over all stages. ``place``: the rank of every stage, where a rank has several.

    Devices may differ by rank of the pipeline, ``h100-80g*4,a100-80g*4``: each has its own rates
    and budget, a message between two takes what the slower link takes, and the latency is the
    longest of all. Papers' constants and reading of K and V, which not all devices have, are then
    left out where one lacks them.
    """
    the_model = model(model_name) if isinstance(model_name, str) else model_name
    if zero is None:
        zero = 3 if the_model.name in PUBLISHED else 1
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
        if len(different) > 1:
            if any(not each.memory_bytes_per_second for each in devices):
                assumptions["kv_read"] = False
            assumptions["published"] = False
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
        kinds = ()  # measured before there were kinds, or of one that has another name
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
    """The analytic profile of one device, and its network, with tp, cp, dp and pp."""
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
    """A ValueError where two files describe devices of one name, or CPUs stand beside GPUs, whose
    budgets mean something else."""
    for each in devices:
        if any(each.name == other.name and each != other for other in devices):
            raise ValueError(
                f"devices {each.name!r} of the pipeline differ; expected a name for each of them"
            )
    if len({each.name.partition(":")[0] == "cpu" for each in devices}) > 1:
        raise ValueError("a pipeline over CPUs and GPUs: expected the one or the other")


def _of_all(name: str, profiles: Sequence[Profile]) -> Profile:
    """Coefficients that all devices share: bytes, the longest latency; the host's memory for none
    where one has no rate to it."""
    first = profiles[0]
    sort = "cpu:" if is_of_cpu(first) else ""
    return dataclasses.replace(
        first,
        provenance=dataclasses.replace(first.provenance, device=f"{sort}{name}"),
        link_latency_seconds=max(each.link_latency_seconds for each in profiles),
        host_bytes_per_second=min(each.host_bytes_per_second for each in profiles),
    )


def _with_blocks(profile: Profile, words: int, cp: int) -> Profile:
    """Where the output layer runs early, it takes a block of each rank's rows at a time."""
    if profile.last_bytes.per_token or not profile.last_workspace_bytes[Kind.FORWARD].per_token:
        return profile
    return dataclasses.replace(profile, last_workspace_tokens=float(head_block_tokens(words) * cp))


def expert_degree(ep: int | None, tp: int, cp: int, experts: int | None, dp: int = 1) -> int:
    """Devices that share a layer's ``experts`` (None: some number): ``ep``, where it is possible;
    default: as many of the tp * cp as divide them. More than those are of several of the ``dp``
    replicas, all of each."""
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
