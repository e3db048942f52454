"""Process groups of one replica in an external training loop.

A loop may call its schedule a different number of times on each replica, for example in
log-probability passes. Therefore only the first call is collective over all replicas.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_epp.mcore.job.process_groups import (
    initialise_communicators,
    layer_groups,
    message_groups,
)
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.link import connect
from megatron_epp.runtime.stage_peers import Peers

CONTROL = "epp_loop_control"


def op_peers(lockstep: int) -> dist.ProcessGroup:
    """Return Megatron's group of the ranks that compute every op of a stage together.

    They are the tensor- and context-parallel ranks of a replica, or of the ``lockstep`` replicas
    that share experts.
    """
    if lockstep > 1:
        return mpu.get_expert_tensor_and_model_parallel_group()
    return mpu.get_tensor_and_context_parallel_group()


def call_ranks(lockstep: int) -> tuple[int, ...]:
    """Return the global ranks that plan a call together: the op peers of every stage.

    Megatron numbers ranks with a constant stride per parallel dimension. The ranks of another stage
    are therefore this stage's ranks plus the distance between the two stages in the pipeline group.
    """
    pipeline = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    together = dist.get_process_group_ranks(op_peers(lockstep))
    own_rank = dist.get_rank()
    return tuple(sorted(peer + rank - own_rank for peer in together for rank in pipeline))


def initialise_communicator(groups: Groups, device: torch.device, config: Any) -> None:
    """Initialise the communicators of all groups that a call uses.

    All ranks of the world must call this function. No rank blocks, because all ranks initialise the
    groups in the same order, before any receive.

    Args:
        groups: Groups of this replica.
        device: Device of this rank.
        config: Megatron's configuration of the model.
    """
    ranks = groups.pipeline_ranks
    connect(groups.payload, groups.pipeline_rank, len(ranks), device, ranks)
    of_replicas = mpu.get_data_parallel_group(with_context_parallel=True)
    for group in (*layer_groups(config), of_replicas):
        initialise_communicators(group, device)


def make_replica_groups(
    device: torch.device, timeout: timedelta, config: Any, lockstep: int
) -> Groups:
    """Create the process groups of all replicas; return the groups of this replica.

    All ranks of the world must call this function, after Megatron has created its groups. Later
    calls of the schedule do not wait for other replicas, except those of the lockstep group.

    Args:
        device: Device of this rank.
        timeout: Timeout of the groups' collectives.
        config: Megatron's configuration of the model.
        lockstep: Number of neighbouring replicas that share experts; 1 if each has all experts.

    Returns:
        Groups whose ``control`` is a gloo group over the replicas in lockstep. The groups in
        ``payload`` span the world; messages address their sender and receiver by global rank.
    """
    pipeline = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    together, own_ranks, me = op_peers(lockstep), call_ranks(lockstep), dist.get_rank()
    control = None
    replicas = dist.get_process_group_ranks(mpu.get_data_parallel_group())
    place = mpu.get_data_parallel_rank() % lockstep
    alike = replicas[place::lockstep]  # the replica in this place of every lockstep group
    for ranks in sorted([rank + other - me for rank in own_ranks] for other in alike):
        # Every rank creates the groups of all replicas in one order, as new_group requires.
        group = dist.new_group(ranks, timeout=timeout, backend="gloo", group_desc=CONTROL)
        control = group if me in ranks else control
    assert control is not None, "this rank is part of a replica"
    payload = message_groups(device, timeout)
    busy = layer_groups(config if lockstep > 1 else None)
    return Groups(
        control=control,
        payload=payload,
        pipeline_ranks=tuple(pipeline),
        pipeline_rank=mpu.get_pipeline_model_parallel_rank(),
        replica=place,
        replicas=lockstep,
        leads=mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0,
        timeout=timeout,
        peers=Peers(together, busy, device) if together.size() > 1 else None,
        lockstep=lockstep,
    )
