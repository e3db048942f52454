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


def replica_ranks() -> tuple[int, ...]:
    """Return the global ranks of this replica: tensor- and context-parallel ranks of every stage.

    Megatron numbers ranks with a constant stride per parallel dimension. The ranks of another stage
    are therefore this stage's ranks plus the distance between the two stages in the pipeline group.
    """
    pipeline = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    together = dist.get_process_group_ranks(mpu.get_tensor_and_context_parallel_group())
    own_rank = dist.get_rank()
    return tuple(sorted(peer + rank - own_rank for peer in together for rank in pipeline))


def initialise_communicator(groups: Groups, device: torch.device, config: Any) -> None:
    """Initialise the communicators of all groups that a call uses. Collective over the world.

    No rank blocks, because all ranks initialise the groups in the same order, before any receive.

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


def make_replica_groups(device: torch.device, timeout: timedelta) -> Groups:
    """Create the process groups of all replicas; return the groups of this replica. Collective.

    All ranks of the world call this function after Megatron has created its groups. Later calls of
    the schedule do not wait for other replicas.

    Args:
        device: Device of this rank.
        timeout: Timeout of the groups' collectives.

    Returns:
        Groups whose ``control`` is a gloo group over the replica. The groups in ``payload`` span
        the world; messages address their sender and receiver by global rank.
    """
    pipeline = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    together = mpu.get_tensor_and_context_parallel_group()
    own_replica, me = replica_ranks(), dist.get_rank()
    control = None
    replicas = dist.get_process_group_ranks(mpu.get_data_parallel_group())
    for ranks in sorted([rank + other - me for rank in own_replica] for other in replicas):
        # Every rank creates the groups of all replicas in one order, as new_group requires.
        group = dist.new_group(ranks, timeout=timeout, backend="gloo", group_desc=CONTROL)
        control = group if me in ranks else control
    assert control is not None, "this rank is part of a replica"
    payload = message_groups(device, timeout)
    return Groups(
        control=control,
        payload=payload,
        pipeline_ranks=tuple(pipeline),
        pipeline_rank=mpu.get_pipeline_model_parallel_rank(),
        replica=0,
        replicas=1,
        leads=mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0,
        timeout=timeout,
        peers=Peers(together, layer_groups(None), device) if together.size() > 1 else None,
    )
