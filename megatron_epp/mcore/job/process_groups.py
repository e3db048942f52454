"""Process groups of elastic pipeline parallelism, derived from Megatron's process groups."""

import logging
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
from megatron_epp.runtime.consensus import all_gathered
from megatron_epp.runtime.groups import Groups, planning_ranks
from megatron_epp.runtime.link import connect
from megatron_epp.runtime.rebuilt import speaking
from megatron_epp.runtime.stage_peers import Peers

logger = logging.getLogger(__name__)

# Largest number of thread blocks of a message's kernel. A kernel that waits for the other end
# occupies them, too: products take 1.00 to 1.18 times as long beside two blocks, and 1.07 to 1.35
# times beside four (cuda_host.py), which reach about 90 GB/s within a node. By default, NCCL would
# occupy up to 32 of 132 multiprocessors, which could not compute meanwhile.
MESSAGE_BLOCKS = 2


def make_groups(
    device: torch.device,
    place: Sequence[int] = (),
    check: Callable[[dist.ProcessGroup], None] = lambda group: None,
) -> Groups:
    """Create the process groups, after Megatron has created its groups.

    All ranks of the world must call this function.

    The groups have Megatron's timeout. The control group (CPU) and one group per kind of
    message contain all ranks of the job. Within a message group, NCCL creates a communicator for
    each pair of ranks that communicate. With several replicas, the ranks that share a plan also
    have a CPU group.

    Args:
        device: Device of this rank.
        place: Pipeline rank of every stage; empty if stage i is on rank i.
        check: Function (control group) that compares, over all ranks, the values from which each
            rank derives the groups. It is called before the other groups are created.

    Raises:
        ValueError: See :func:`message_groups`; or ``check`` raises it.
    """
    # Imported here: external training loops use this module with another trainer.
    from megatron.training import get_args

    args = get_args()
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    control = dist.new_group(backend="gloo", timeout=timeout, group_desc="epp_control")
    check(control)
    payload = message_groups(device, timeout, vocabulary_parallel(args), place)
    together, lockstep = mpu.get_tensor_and_context_parallel_group(), lockstep_of(args)
    if lockstep > 1:
        # The ranks that share the experts of a layer are all ranks of the lockstep group.
        together = mpu.get_expert_tensor_and_model_parallel_group()
    if together.size() > 1 and dist.get_rank() == 0 and args.high_priority_stream_groups:
        names = " ".join(args.high_priority_stream_groups)
        logger.info("streams of high priority (--high-priority-stream-groups): %s", names)
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
    """Create the group of the ranks that share a plan.

    All ranks of ``control`` must call this function.

    Args:
        number: Index of this rank's lockstep group, or of its replica without lockstep.
        control: CPU group of all ranks.
        timeout: Timeout of the group.

    Returns:
        The group; the planning rank, as an index in the group; and the number of planning ranks
        on this host, but at least 1.
    """
    every = all_gathered((socket.gethostname(), number), control)
    hosts, blocks = [host for host, _ in every], [block for _, block in every]
    planners = planning_ranks(hosts, blocks)
    here = sum(hosts[rank] == hosts[control.rank()] for rank in planners.values())
    group, planner = None, 0
    for block in planners:
        # torch requires that every rank creates every group, in the same order.
        ranks = [rank for rank, other in enumerate(blocks) if other == block]
        new = dist.new_group(ranks, timeout=timeout, backend="gloo", group_desc="epp_block")
        if block == number:
            group, planner = new, ranks.index(planners[block])
    assert group is not None, "this rank is in one of the blocks"
    return group, planner, max(1, here)


def layer_groups(holder: Any) -> list[dist.ProcessGroup]:
    """Return this rank's groups in which layers communicate.

    ``holder`` is Megatron's args or a model configuration, from which the layer kinds decide which
    groups to add, such as expert-parallel groups. If ``holder`` is None, the function returns only
    the tensor- and context-parallel groups.
    """
    groups = [mpu.get_tensor_model_parallel_group(), mpu.get_context_parallel_group()]
    return groups + [group for part in LAYER_KINDS for group in part.layer_groups(holder)]


def trainer_groups(args: Any) -> Iterator[dist.ProcessGroup]:
    """Yield this rank's groups in which Megatron's trainer communicates outside of layers.

    The trainer sums gradients, gradient norms and token counts in these groups. The order of the
    groups is the same on all ranks.
    """
    yield mpu.get_data_parallel_group(with_context_parallel=True)
    yield mpu.get_pipeline_model_parallel_group()
    yield mpu.get_model_parallel_group()
    assert dist.group.WORLD is not None, "Megatron has made its groups"
    yield dist.group.WORLD
    if args.use_distributed_optimizer:
        yield mpu.get_intra_distributed_optimizer_instance_group()
    embedding = mpu.get_embedding_group(check_initialized=False)
    if not args.untie_embeddings_and_output_weights and embedding is not None:
        yield embedding  # None on ranks outside of the group
    for part in LAYER_KINDS:
        yield from part.trainer_groups(args)


def message_groups(
    device: torch.device, timeout: timedelta, of_head: bool = False, place: Sequence[int] = ()
) -> dict[Payload, dist.ProcessGroup]:
    """Create one group of all ranks for each kind of message.

    All ranks of the world must call this function.

    The function also initialises every link between stages. With one pipeline rank, it creates no
    groups.

    Args:
        device: Device of this rank.
        timeout: Timeout of the groups.
        of_head: Whether to add a group for messages of H (vocabulary parallelism).
        place: Pipeline rank of every stage; empty if stage i is on rank i.

    Returns:
        The groups by kind of message (payload).

    Raises:
        ValueError: torch.distributed was initialised with a device_id, which would block pipelines.
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
    """Return NCCL's options for a group of messages.

    The result is None if messages do not use NCCL: on a CPU-only host, or if ranks share a GPU.
    """
    # In a mixed world, dist.get_backend() would return both names: "cpu:gloo,cuda:nccl".
    world = speaking(dist.distributed_c10d._get_default_group())
    if device.type != "cuda" or world._get_backend(device).name() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    # With high priority, a message's thread blocks need not wait for those of attention and norms.
    options.is_high_priority_stream = True
    options._timeout = timeout  # torch warns if it differs from the group's
    options.config.max_ctas = MESSAGE_BLOCKS
    options.config.min_ctas = 1
    return options


def initialise_communicators(group: dist.ProcessGroup, device: torch.device) -> None:
    """Run one all-reduce in ``group``, so that NCCL creates its communicator now.

    NCCL may wait for the device and for all ranks of the group when it creates a communicator. In
    an iteration with posted receives, this wait could block. NCCL also needs memory for the
    communicator, but later torch may have reserved all memory.
    """
    if group.size() > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
