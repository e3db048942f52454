"""Cost model for the model, device, layout and memory budget that the options name."""

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_epp.cli.flags import ASSUMPTIONS
from megatron_epp.cli.options import UsageError
from megatron_epp.cost.analytic import budgeted, is_of_cpu
from megatron_epp.cost.build import expert_degree, named_cost
from megatron_epp.cost.catalogue.devices import DEVICES, GIB, device, device_budgets
from megatron_epp.cost.catalogue.models import MODELS, Model, model
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import parse_kinds
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.network.topology import topology
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Plan
from megatron_epp.planner.padding import gpu_row_multiple
from megatron_epp.planner.tuning.layouts import Layout
from megatron_epp.planner.tuning.node_map import map_nodes

# The commands' assumptions of the analytic cost model, which match training. The library's defaults
# are those of the papers: logits held, no reads of K and V, rates by a group's size alone.
AS_TRAINED: dict[str, Any] = {
    "logits_held": False,
    "kv_read": True,
    "topology": "nodes",
    "stacked_experts": True,
}


def names_machine(arguments: argparse.Namespace) -> bool:
    """Return whether the options name a machine.

    Raises:
        UsageError: if options describe the use of a machine, but no option names one.
    """
    if arguments.model or arguments.device or arguments.cost_model:
        return True
    others = ("layers", "vocab_parallel", "layer_kinds", "memory_budget_gib", "zero", "multiple")
    for name in (*others, "dp", "tp", "cp", "ep", *ASSUMPTIONS):
        if getattr(arguments, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect without a machine; expected --model and "
                "--device, or --cost-model"
            )
    return False


def model_of(arguments: argparse.Namespace) -> Model:
    """Return the model of --model, which is a name, a file, or a model that was read before."""
    named = arguments.model
    return named if isinstance(named, Model) else model(named, getattr(arguments, "like", None))


def cost_of(
    arguments: argparse.Namespace,
    *,
    pp: int,
    cp: int,
    dp: int,
    layers: tuple[int, ...] | None,
    cut: bool = False,
    place: tuple[int, ...] = (),
) -> Cost:
    """Return the cost model of a layout, for the model and machine that the options name.

    A profile file (--cost-model) can replace the model and the device, if the layers of every stage
    and a memory budget are given.

    Args:
        arguments: options of the command.
        pp: number of stages.
        cp: context-parallel degree.
        dp: number of replicas.
        layers: number of layers of every stage; None for numbers that differ by at most one.
        cut: whether to use vocabulary parallelism.
        place: rank of every stage; () if every rank has one stage.

    Raises:
        UsageError: if options are missing or contradict each other.
        ValueError: if a name or file is not valid, the sizes do not fit the model, or the model
            states do not fit in memory.
    """
    profile = Profile.load(arguments.cost_model) if arguments.cost_model else None
    zero = int(arguments.zero or 1)
    assumptions = {
        name: value for name in ASSUMPTIONS if (value := getattr(arguments, name)) is not None
    }
    if profile is not None and assumptions:
        flag = "--" + next(iter(assumptions)).replace("_", "-")
        raise UsageError(f"{flag}: an assumption of the analytic cost model; not with --cost-model")
    if layers is not None and len(layers) != pp:
        raise UsageError(f"--layers: {len(layers)} numbers for {pp} stages")
    kinds: tuple[str, ...] = ()
    if arguments.layer_kinds is not None:
        if profile is None:
            raise UsageError("--layer-kinds: the model says what its layers are; leave it out")
        kinds = parse_kinds(arguments.layer_kinds)
    budgets = None
    if arguments.memory_budget_gib is not None:
        rank_of = place or tuple(range(pp))
        budgets = device_budgets("--memory-budget-gib", arguments.memory_budget_gib, rank_of)
    if profile is not None and arguments.model is None:
        cost = _measured_cost(arguments, profile, budgets, pp, cp, dp, layers, zero, kinds, place)
        cost = cost.with_vocabulary(cut)
    else:
        for name, known in (("model", MODELS), ("device", DEVICES)):
            if getattr(arguments, name) is None:
                raise UsageError(
                    f"--{name} is missing; expected one of {', '.join(known)}, or a JSON file"
                )
        the_model = model_of(arguments)
        joined = assumptions.get("topology")
        grid = topology(joined) if isinstance(joined, str) else joined
        if grid is not None and grid.nodes:  # a grid of nodes: the part that the layout uses
            layout = Layout(arguments.tp or 1, cp, 1 + max(place) if place else pp, dp)
            node_devices = grid.node_devices or device(arguments.device).node_devices
            used = map_nodes(grid, layout, node_devices, arguments.ep or 1)
            assumptions["topology"] = used.topology
        cost = named_cost(
            the_model,
            arguments.device,
            pp=pp,
            tp=arguments.tp,
            cp=cp,
            dp=dp,
            zero=zero,
            memory_budget_gib=None if budgets is None else max(budgets) / GIB,
            layers=layers,
            ep=arguments.ep,
            layer_kinds=kinds,
            profile=profile,
            vocabulary_parallel=cut,
            place=place,
            **({} if profile is not None else AS_TRAINED | assumptions),
        )
        if the_model.heads % (cost.layout.tp * cost.layout.cp):
            raise UsageError(
                f"--tp {cost.layout.tp} --cp {cost.layout.cp}: their product must divide the "
                f"{the_model.heads} attention heads of {the_model.name}"
            )
    if budgets is not None:
        cost = cost.replace(device_budget_bytes=budgets)
    # in commands that make plans
    if (host := getattr(arguments, "host_memory_gib", None)) is not None:
        cost = cost.replace(host_budget_bytes=host * GIB)
    cost.require_states_fit()
    return cost


def _measured_cost(
    arguments: argparse.Namespace,
    profile: Profile,
    budgets: tuple[float, ...] | None,
    pp: int,
    cp: int,
    dp: int,
    layers: tuple[int, ...] | None,
    zero: int,
    kinds: tuple[str, ...],
    place: tuple[int, ...],
) -> Cost:
    """Return the cost model from a profile file, without the shape of a model."""
    if layers is None:
        raise UsageError(
            "--layers is missing: a profile file does not say how many layers there are"
        )
    if budgets is None:
        if arguments.device is None:
            raise UsageError("--memory-budget-gib is missing (or a --device, for its own)")
        ranks = 1 + max(place) if place else pp
        budgets = (device(arguments.device).budget_bytes,) * ranks
    if len(profile.kinds) > 1 and not kinds:
        raise UsageError(
            f"--layer-kinds is missing: the profile knows the kinds {', '.join(profile.kinds)}; "
            "expected that of every layer"
        )
    experts = None if any(each.expert_parameters for each in profile.kinds.values()) else 0
    ep = expert_degree(arguments.ep, arguments.tp, cp, experts, dp)
    degrees = (arguments.tp, cp, dp, zero, ep)
    return Cost(StageLayout(budgeted(profile), layers, *degrees, kinds, place=place), budgets)


def with_padding(
    cost: Cost,
    arguments: argparse.Namespace,
    batches: Sequence[Sequence[int]],
    replicas: int,
) -> Cost:
    """Return ``cost`` with chunks padded to --multiple tokens, or by default as in training.

    Args:
        cost: cost model of the layout.
        arguments: options of the command.
        batches: document lengths of all replicas, which determine training's padding.
        replicas: number of replicas.
    """
    layout, multiple = cost.layout, getattr(arguments, "multiple", None)
    if multiple is None:
        ranks = layout.tp * layout.cp  # training shards rows over both
        of_rank = gpu_row_multiple(batches, layout.placement.ranks, replicas, ranks)
        multiple = 1 if is_of_cpu(layout.profile) else of_rank * ranks
    return cost.replace(multiple=multiple)


def padding_text(cost: Cost) -> str:
    """Return a note on the padding of chunks; empty without padding."""
    return f"chunks to multiples of {cost.multiple} tokens" if cost.multiple > 1 else ""


def plan_cost(arguments: argparse.Namespace, plan: Plan) -> Cost:
    """Return the cost model for a plan, which determines stages, layers and replicas."""
    if arguments.layers and tuple(arguments.layers) != plan.layers:
        named = " ".join(map(str, plan.layers))
        raise UsageError(f"--layers: the plan is for layers {named}; leave the option out")
    dp = plan.replicas if arguments.dp is None else arguments.dp
    asked = arguments.vocab_parallel
    cut = plan.vocabulary_parallel
    if (asked == "on" and not cut) or (asked == "off" and cut):
        has = "has ops H and G" if cut else "has no ops H and G"
        raise UsageError(f"--vocab-parallel {asked}: the plan {has}; leave the option out")
    here = argparse.Namespace(**{**vars(arguments), "tp": arguments.tp or 1})
    degrees: dict[str, Any] = {"pp": plan.stages, "cp": arguments.cp or 1, "dp": dp}
    cost = cost_of(here, **degrees, layers=plan.layers, cut=cut, place=plan.place)
    return with_padding(cost, arguments, [plan.documents], 1)
