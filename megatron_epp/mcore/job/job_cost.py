"""Inputs of a job's planner: the cost of ops on this job's devices, levers and memory budgets."""

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_epp.control.files import write_atomically
from megatron_epp.control.planned_steps import PlannedSteps
from megatron_epp.control.planner_pool import PROCESS_BYTES, default_cores
from megatron_epp.cost.analytic import ALL, EXPERTS, STATES, without_states
from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.catalogue.devices import GIB, device, device_budgets, device_like, gpu_name
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import Profile, States
from megatron_epp.layers.attention.cpu import PartsAttention
from megatron_epp.layers.attention.varlen import VarlenAttention
from megatron_epp.mcore.capabilities.refusals import vocabulary_parallel
from megatron_epp.mcore.flags.config import Config
from megatron_epp.mcore.kinds.registry import (
    expert_ranks_of,
    groups_products,
    priced_flags,
    stacks_experts,
)
from megatron_epp.mcore.lm_head.fused_head import block_tokens, fused_head
from megatron_epp.mcore.model.quantisation import weight_bytes
from megatron_epp.mcore.model.shape import model_shape
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.mcore.placing.requested import place_of
from megatron_epp.runtime.consensus import all_gathered, broadcast_result
from megatron_epp.runtime.groups import Groups
from megatron_epp.safe_files import bounded_text

logger = logging.getLogger(__name__)

DEFAULT_BUDGETS = "epp-default-budgets.json"  # bytes by pipeline rank, next to the checkpoint
DEFAULT_HOST_BUDGET = "epp-default-host-budget.json"  # bytes, next to the checkpoint
CPU_FRACTION = 0.8  # fraction of the available memory for chunks
UNBROKEN = 0.97  # usable fraction of a GPU's memory; fragmentation wastes the rest
# Fractions of the available memory for offloading. Pinned memory cannot be swapped out, and data,
# planner and checkpoints also need memory. On a CPU-only host, chunks and offloaded data share the
# memory.
HOST_FRACTION, CPU_HOST_FRACTION = 0.5, 0.15
HOST_PLANNED = 0.95  # planned fraction of the host budget; allocations are rounded up


def make_planning(
    args: Any,
    config: Config,
    layers: tuple[int, ...],
    multiple: int,
    groups: Groups,
    profile: Profile,
) -> PlannedSteps:
    """Return the job's planner, with memory budgets that rank 0 broadcasts.

    All ranks of the job must call this function.

    Args:
        args: Megatron's arguments.
        config: The configuration of --epp.
        layers: Number of layers of every stage.
        multiple: The rows of a chunk, over all ranks that share them, are padded to a multiple of
            this number.
        groups: The job's process groups.
        profile: The measured or analytic cost coefficients.

    Raises:
        ValueError: A value of --epp-planner, --epp-levers, --epp-memory-budget-gib or
            --epp-host-memory-gib is not valid in this job, ``profile`` does not fit the stages, or
            a file of memory budgets is damaged or cannot be written.
    """
    from megatron_epp.planner.options import Options
    from megatron_epp.planner.registry import planner_of

    planner = planner_of(config.epp_planner)
    options = Options(
        context=args.seq_length,
        levers=training_levers(config.epp_levers),
        effort=config.epp_effort,
        lockstep=groups.lockstep,
    )
    named = {word.strip() for word in config.epp_levers.split(",")}
    if "local" in named and (args.context_parallel_size == 1 or groups.lockstep > 1):
        why = "in lockstep all documents are spread" if groups.lockstep > 1 else "there is one rank"
        raise ValueError(
            f"--epp-levers {config.epp_levers}: no document can be left to one context-parallel "
            f"rank, as {why}; leave local out"
        )
    if "offload" in named:
        _require_rate(profile, config)
    elif config.epp_host_memory_gib is not None and "offload" not in options.levers:
        logger.warning("--epp-host-memory-gib has no effect without the lever offload")
    cost = training_cost(args, config, layers, profile).replace(multiple=multiple)
    planner.require_place(cost.layout.placement.place)
    # Available memory differs between hosts and over time, so all ranks use rank 0's budget. If
    # devices have different names, each pipeline rank gets its own budget.
    unlike: tuple[float, ...] = ()
    if config.epp_memory_budget_gib is None:
        own = (groups.pipeline_rank, device_name(), cost.device_budget_bytes[0])
        unlike = unlike_budgets(all_gathered(own, groups.control))
    folders = [folder for folder in (args.save, config.epp_record) if folder]
    host = HOST_PLANNED * host_budget_bytes(config)

    def budgets() -> str:
        devices, of_host = unlike or cost.device_budget_bytes, host
        try:
            if config.epp_memory_budget_gib is None:
                devices = saved_budgets(args, cost.layout.placement.ranks) or devices
                if args.save:
                    write_atomically(Path(args.save) / DEFAULT_BUDGETS, json.dumps(devices))
            if "offload" in options.levers and config.epp_host_memory_gib is None:
                (of_host,) = _bytes_in_file(args, DEFAULT_HOST_BUDGET) or (host,)
                if args.save:
                    write_atomically(Path(args.save) / DEFAULT_HOST_BUDGET, json.dumps([of_host]))
        except OSError as failure:
            raise ValueError(
                f"{failure.filename}: {failure.strerror}; name a folder that can be written"
            ) from failure
        return json.dumps([devices, of_host])

    devices, host_bytes = json.loads(broadcast_result(budgets, groups.control))
    cost = cost.replace(device_budget_bytes=tuple(devices))
    if "offload" in options.levers:
        cost = cost.replace(host_budget_bytes=host_bytes)
    cores = planner_cores(config)
    processes = cores and max(1, cores // groups.planners_here)
    return PlannedSteps(cost, options, config.epp_planner, groups, processes, folders)


def training_levers(text: str) -> frozenset[str]:
    """Return the levers that ``text``, the value of --epp-levers, selects in this job.

    Raises:
        ValueError: ``text`` names an unknown lever.
    """
    from megatron_epp.planner.options import TRAINING_LEVERS, parse_levers

    # On a CPU-only host, offloading saves nothing: chunks already lie in host memory.
    return parse_levers(text, TRAINING_LEVERS | ({"offload"} if cpu_host.has_gpu() else set()))


# ------------------------------------------------------------------ cost


def analytic(args: Any) -> Profile:
    """Compute the coefficients of --epp-cost-model analytic from model shape and device name."""
    early = fused_head(args)
    profile = analytic_profile(
        model_shape(args),
        device(device_name()),
        logits_held=not early,
        kept_in_input=kept_in_input(args),
        dtype=str(args.params_dtype),
        **priced_flags(args),
    )
    attention = VarlenAttention if cpu_host.has_gpu_kernels() else PartsAttention
    return replace(
        profile,
        stores_last_slice=attention.stores_last_slice,
        # Each context-parallel rank computes one block of its rows at a time.
        last_workspace_tokens=float(block_tokens(args) * args.context_parallel_size)
        if early
        else 0.0,
    )


def kept_in_input(args: Any) -> str:
    """Return the linears whose weight gradients I computes (mcore/model/split_backward.py)."""
    if args.transformer_impl == "local":
        return ALL if args.gradient_accumulation_fusion else ""
    return EXPERTS if groups_products(args) else ""


def on_these_ranks(args: Any, profile: Profile) -> Profile:
    """Return ``profile``, without its slowness if this job has another number of pipeline ranks.

    The slowness is the relative time of an op on each pipeline rank. With --epp-cost-model and
    without --epp-layouts, the function keeps the slowness, so that :func:`training_cost` raises an
    error.
    """
    fits = len(profile.rank_slowness) in (0, args.pipeline_model_parallel_size)
    if fits or (args.epp_cost_model is not None and args.epp_layouts is None):
        return profile
    return profile.without_slowness


def training_cost(args: Any, config: Config, layers: tuple[int, ...], profile: Profile) -> Cost:
    """Return the predicted seconds and bytes of this job's ops, and its memory budgets.

    On a CPU, the memory budget covers the bytes that chunks hold, but not weights, gradients and
    optimizer states.

    Args:
        args: Megatron's arguments.
        config: The configuration of --epp.
        layers: Number of layers of every stage.
        profile: The measured or analytic cost coefficients.

    Raises:
        ValueError: --epp-memory-budget-gib has neither one value nor one for each pipeline rank, or
            ``profile`` does not fit the stages.
    """
    if cpu_host.has_gpu():
        profile = replace(profile, states=training_states(args))
    else:
        profile = without_states(profile)
    place = place_of(args)
    budgets = config.epp_memory_budget_gib
    if budgets is None:
        budgets = (default_budget_bytes(args) / GIB,)
    rank_of = place or tuple(range(len(layers)))
    return Cost(
        StageLayout(
            profile,
            layers,
            tp=args.tensor_model_parallel_size,
            cp=args.context_parallel_size,
            dp=args.data_parallel_size,
            zero=1,
            ep=expert_ranks_of(args),
            layer_kinds=model_shape(args).layer_kinds if len(profile.kinds) > 1 else (),
            vocabulary_parallel=vocabulary_parallel(args),
            place=place,
            stacked_experts=stacks_experts(args),
        ),
        device_budgets("--epp-memory-budget-gib", budgets, rank_of),
    )


def unlike_budgets(every: Sequence[tuple[int, str, float]]) -> tuple[float, ...]:
    """Return each pipeline rank's smallest default budget in bytes; () if device names are equal.

    ``every`` contains (pipeline rank, device name, default budget in bytes) for every rank.
    """
    if len({name for _, name, _ in every}) == 1:
        return ()
    least: dict[int, float] = {}
    for rank, _, bytes_ in every:
        least[rank] = min(bytes_, least.get(rank, bytes_))
    return tuple(least[rank] for rank in sorted(least))


def training_states(args: Any) -> States:
    """Return the bytes per parameter that Megatron holds on a GPU between iterations.

    The bytes include the weight, the gradient and the optimizer states. The distributed optimizer
    shards the optimizer states over the replicas.
    """
    weight = args.params_dtype.itemsize
    gradient = 4 if args.accumulate_allreduce_grads_in_fp32 else weight
    optimizer = 0.0 if weight == 4 else args.main_params_dtype.itemsize  # the fp32 master weight
    if args.optimizer == "sgd":
        optimizer += 4 if args.sgd_momentum else 0
    else:  # Adam's two; other optimizers have no more
        optimizer += args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
    if args.optimizer_cpu_offload:
        optimizer *= 1 - args.optimizer_offload_fraction
    sharded = optimizer if args.use_distributed_optimizer else 0.0
    held = weight_bytes(args) + gradient + optimizer - sharded
    return replace(STATES, zero1_resident=held, zero1_sharded=sharded)


def device_name() -> str:
    """Return the name of this process's device in the catalogue; "cpu" without a GPU.

    The function looks up the chip, among devices whose memory budget fits into this device. If the
    catalogue has none, the function looks up the memory size and the compute capability.
    """
    if not cpu_host.has_gpu():
        return "cpu"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    named = device_like(properties.name, properties.total_memory)
    return gpu_name(properties.total_memory, properties.major) if named is None else named.name


def default_budget_bytes(args: Any) -> float:
    """Return the default memory budget of this device in bytes.

    On a GPU, the budget is the catalogue's budget, or 97% of the free memory if that is less.
    CUDA's context, the initialised communicators and other processes reduce the free memory. On a
    CPU, the memory of planner processes is subtracted from the available memory, and 80% of the
    rest is divided between the local ranks; chunks must fit in this budget.
    """
    if cpu_host.has_gpu():
        free, _ = torch.cuda.mem_get_info()
        there = free + torch.cuda.memory_reserved()
        return min(device(device_name()).budget_bytes, UNBROKEN * there)
    return CPU_FRACTION * _available_bytes(args)


def host_budget_bytes(config: Config) -> float:
    """Return the bytes of host memory that this rank may use for offloading.

    The result is --epp-host-memory-gib. Without this flag, the memory of planner processes is
    subtracted from the available memory, and a fraction of the rest (50% with a GPU, 15% without)
    is divided between the local ranks.

    Raises:
        ValueError: --epp-host-memory-gib exceeds the host's memory divided by its ranks.
    """
    wanted = config.epp_host_memory_gib
    if wanted is None:
        fraction = HOST_FRACTION if cpu_host.has_gpu() else CPU_HOST_FRACTION
        return fraction * _available_bytes(config)
    total = _of_each_rank(psutil.virtual_memory().total)
    if wanted * GIB > total:
        raise ValueError(
            f"--epp-host-memory-gib {wanted:g}: this host has {total / GIB:.4g} GiB for each of "
            f"its {_local_ranks()} ranks; expected less"
        )
    return wanted * GIB


def planner_cores(settings: Any) -> int:
    """Return the number of this host's cores for planner processes; 0 if the trainer plans."""
    if not settings.epp_plan_ahead:
        return 0
    return settings.epp_plan_cores or default_cores(_local_ranks())


def _available_bytes(settings: Any) -> float:
    """Return the available host bytes per local rank, minus the bytes of planner processes.

    ``settings`` contains the flags that determine the number of planner processes.
    """
    available = psutil.virtual_memory().available
    return _of_each_rank(max(0.0, available - PROCESS_BYTES * planner_cores(settings)))


def _of_each_rank(bytes_: float) -> float:
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        bytes_ = min(bytes_, int(text))
    return bytes_ / _local_ranks()


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _require_rate(profile: Profile, config: Config) -> None:
    """Raise a ValueError if the cost model has no rate of copies to host memory (for offload)."""
    if not profile.host_bytes_per_second:
        raise ValueError(
            f"--epp-levers {config.epp_levers}: the cost model of {profile.provenance.device} has "
            "no rate to the host's memory, so nothing would be offloaded; measure one with "
            "`python -m megatron_epp profile`, or leave offload out"
        )


def saved_budgets(args: Any, ranks: int) -> tuple[float, ...] | None:
    """Return the memory budget in bytes of each pipeline rank, as saved by the resumed run.

    The result is None if the run saved no budgets, or if it had another number of pipeline ranks
    than ``ranks``.

    Raises:
        ValueError: The file is damaged.
    """
    budgets = _bytes_in_file(args, DEFAULT_BUDGETS)
    return None if budgets is None or len(budgets) != ranks else budgets


def _bytes_in_file(args: Any, name: str) -> tuple[float, ...] | None:
    """Return the budgets in the file ``name`` next to the loaded checkpoint, or None."""
    path = Path(args.load or "") / name
    if not args.load or not path.exists():
        return None
    try:
        budgets = json.loads(bounded_text(path, "a list of bytes", "replace"))
        if not isinstance(budgets, list) or not all(
            isinstance(one, int | float) and not isinstance(one, bool) and 0 < one < math.inf
            for one in budgets
        ):
            raise ValueError("expected a list of bytes by rank")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: no memory budgets ({error}); delete the file: budgets then follow from the "
            "memory that is available now, or give --epp-memory-budget-gib"
        ) from error
    return tuple(budgets)
