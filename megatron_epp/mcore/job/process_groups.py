"""The process groups of elastic pipelines, made from Megatron's."""

import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_epp.ir import Payload
from megatron_epp.mcore.capabilities.refusals import vocabulary_parallel
from megatron_epp.mcore.kinds.registry import LAYER_KINDS, lockstep_of
from megatron_epp.runtime.groups import Groups, planning_ranks
from megatron_epp.runtime.link import connect
from megatron_epp.runtime.rebuilt import speaking
from megatron_epp.runtime.stage_peers import Peers

# Blocks of a GPU that a message may hold, those that wait for their other end included. Four carry
# some 90 GB/s within a node; NCCL takes up to 32 of 132, on which nothing is computed meanwhile.
MESSAGE_BLOCKS = 4


def make_groups(
    device: torch.device,
    place: Sequence[int] = (),
    check: Callable[[dist.ProcessGroup], None] = lambda group: None,
) -> Groups:
    """Collective: every rank calls it once, after Megatron has made its groups. ``place``: the rank
    of every stage; none where stage i lies on rank i. ``check`` compares, over the control group,
    what ranks know alone and make the other groups by.

    Who waits in them for another rank fails after as long as in Megatron's groups. Those of
    messages span the world, so there are three with the control group however large it is: a
    message names both its ends, and NCCL makes a communicator for each pair of ranks that speak.
    The ranks that are planned for together have a group, on the host.
    """
    # Here, not above: loops of others need messages, and have another trainer than Megatron's.
    from megatron.training import get_args

    args = get_args()
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    control = dist.new_group(backend="gloo", timeout=timeout, group_desc="epp_control")
    check(control)
    payload = message_groups(device, timeout, vocabulary_parallel(args), place)
    together, lockstep = mpu.get_tensor_and_context_parallel_group(), lockstep_of(args)
    if lockstep > 1:
        # The ranks that share a layer's experts are all those of the block's replicas.
        together = mpu.get_expert_tensor_and_model_parallel_group()
    busy = layer_groups(args if lockstep > 1 else None)
    for group in (*layer_groups(args), *trainer_groups(args)):
        initialise_communicators(group, device)
    block, planner, planners_here = None, 0, 1
    if mpu.get_data_parallel_world_size() > lockstep:
        number = mpu.get_data_parallel_rank() // lockstep
        block, planner, planners_here = block_group(number, control, timeout)
    return Groups(
        control=control,
        payload=payload,
        pipeline_ranks=tuple(dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())),
        pipeline_rank=mpu.get_pipeline_model_parallel_rank(),
        replica=mpu.get_data_parallel_rank(),
        replicas=mpu.get_data_parallel_world_size(),
        leads=mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0,
        timeout=timeout,
        peers=Peers(together, busy, device) if together.size() > 1 else None,
        lockstep=lockstep,
        block=block,
        planner=planner,
        planners_here=planners_here,
    )


def block_group(
    number: int, control: dist.ProcessGroup, timeout: timedelta
) -> tuple[dist.ProcessGroup, int, int]:
    """Make the group of the replicas that are planned together. Collective over ``control``.

    Args:
        number: of this rank's block: its replica, or those in lockstep with it.
        control: all ranks, on the host.
        timeout: after which who waits for another rank fails.

    Returns:
        The group; its rank that plans; how many ranks of this host do.
    """
    every: list[Any] = [None] * control.size()
    dist.all_gather_object(every, (socket.gethostname(), number), group=control)
    hosts, blocks = [host for host, _ in every], [block for _, block in every]
    planners = planning_ranks(hosts, blocks)
    here = sum(hosts[rank] == hosts[control.rank()] for rank in planners.values())
    group, planner = None, 0
    for block in planners:
        # Every rank makes every block's group, in one order, as Megatron makes its own.
        ranks = [rank for rank, other in enumerate(blocks) if other == block]
        new = dist.new_group(ranks, timeout=timeout, backend="gloo", group_desc="epp_block")
        if block == number:
            group, planner = new, ranks.index(planners[block])
    assert group is not None, "this rank is in one of the blocks"
    return group, planner, max(1, here)


def layer_groups(holder: Any) -> list[dist.ProcessGroup]:
    """This rank's groups that all layers speak in; and those of some kinds of layers, of the model
    of ``holder``, flags or a configuration."""
    groups = [mpu.get_tensor_model_parallel_group(), mpu.get_context_parallel_group()]
    return groups + [group for part in LAYER_KINDS for group in part.layer_groups(holder)]


def trainer_groups(args: Any) -> Iterator[dist.ProcessGroup]:
    """This rank's groups that an iteration of Megatron's trainer speaks in, outside of layers: to
    add up gradients, their norm and tokens. All ranks have theirs in one order."""
    yield mpu.get_data_parallel_group(with_context_parallel=True)
    yield mpu.get_pipeline_model_parallel_group()
    yield mpu.get_model_parallel_group()
    assert dist.group.WORLD is not None, "Megatron has made its groups"
    yield dist.group.WORLD
    if args.use_distributed_optimizer:
        yield mpu.get_intra_distributed_optimizer_instance_group()
    embedding = mpu.get_embedding_group(check_initialized=False)
    if not args.untie_embeddings_and_output_weights and embedding is not None:
        yield embedding  # only the ranks of such a group know of it
    for part in LAYER_KINDS:
        yield from part.trainer_groups(args)


def message_groups(
    device: torch.device, timeout: timedelta, of_head: bool = False, place: Sequence[int] = ()
) -> dict[Payload, dist.ProcessGroup]:
    """A group that spans the world for each direction of messages, every link of which has spoken
    once; none where there is one stage. Collective over the world.

    ``of_head``: with one for messages of H. ``place``: the rank of every stage.

    ValueError: torch.distributed was initialised in a way in which pipelines stand still.
    """
    pipeline = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    groups: dict[Payload, dist.ProcessGroup] = {}
    if len(pipeline) > 1:
        for direction in Payload:
            if direction is Payload.HEAD and not of_head:
                continue
            options = message_options(device, timeout)
            groups[direction] = dist.new_group(
                timeout=timeout,
                backend=None if options is None else "nccl",
                pg_options=options,
                group_desc=f"epp_{direction.name.lower()}",
            )
    rank = mpu.get_pipeline_model_parallel_rank()
    connect(groups, rank, len(pipeline), device, pipeline, place)
    return groups


def message_options(device: torch.device, timeout: timedelta) -> Any:
    """How NCCL carries the messages of one direction; None where it does not: on a host without a
    GPU, and where ranks share one."""
    # Of a mixed world ("cpu:gloo,cuda:nccl") dist.get_backend() gives the whole name.
    world = speaking(dist.distributed_c10d._get_default_group())
    if device.type != "cuda" or world._get_backend(device).name() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    # Blocks of a message's kernel do not queue behind waiting blocks of attention and norms.
    options.is_high_priority_stream = True
    options._timeout = timeout  # torch warns where it is not the group's own
    options.config.max_ctas = MESSAGE_BLOCKS
    options.config.min_ctas = 1
    return options


def initialise_communicators(group: dist.ProcessGroup, device: torch.device) -> None:
    """NCCL makes a communicator when a group first speaks, which may wait for the device and for
    all ranks of the group: not in the midst of an iteration, where receives are posted, nor at its
    end, when torch holds the memory that it needs."""
    if group.size() > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
