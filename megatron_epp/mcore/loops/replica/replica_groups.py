"""Process groups of one replica in a loop of others.

A loop may call its schedule more often on one replica than on another (passes of log-probabilities
over batches of several sizes): but for the first call, no rank waits for one of another replica.
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
    """The ranks of this replica: every stage's tensor- and context-parallel ranks.

    Megatron numbers ranks by a stride for each degree, so that the ranks of another stage lie as
    far from these as that stage's rank of this pipeline does from this one.
    """
    pipeline = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    together = dist.get_process_group_ranks(mpu.get_tensor_and_context_parallel_group())
    own_rank = dist.get_rank()
    return tuple(sorted(peer + rank - own_rank for peer in together for rank in pipeline))


def meets_other_replicas(config: Any) -> bool:
    """Whether ranks of other replicas meet this one's inside of its ops: in layers that are spread
    over replicas, in scales of fp8 that are. Such replicas must run the same ops in the same order,
    whatever documents each has."""
    own_replica = {*replica_ranks()}
    if any(
        not {*dist.get_process_group_ranks(group)} <= own_replica for group in layer_groups(config)
    ):
        return True
    several = mpu.get_data_parallel_world_size() > 1
    # Transformer Engine takes the largest values of all replicas behind every forward and backward.
    scales = getattr(config, "fp8", None) and getattr(config, "fp8_recipe", None) == "delayed"
    alone = getattr(config, "tp_only_amax_red", False)
    return several and bool(scales and not alone)


def initialise_communicator(groups: Groups, device: torch.device, config: Any) -> None:
    """Let all groups of a call of the model of ``config`` speak once, in an order in which nobody
    waits in vain, before anything is received early. Collective over the world."""
    ranks = groups.pipeline_ranks
    connect(groups.payload, groups.pipeline_rank, len(ranks), device, ranks)
    of_replicas = mpu.get_data_parallel_group(with_context_parallel=True)
    for group in (*layer_groups(config), of_replicas):
        initialise_communicators(group, device)


def make_replica_groups(device: torch.device, timeout: timedelta) -> Groups:
    """Collective over the world, once Megatron has made its groups; afterwards no replica waits for
    another. ``control`` of the result spans the replica; the groups of ``payload`` span the world,
    and a message names both its ends.

    ValueError: torch.distributed was initialised in a way in which pipelines stand still.
    """
    if dist.distributed_c10d._get_default_group().bound_device_id is not None:
        raise ValueError("torch.distributed initialised with a device_id")
    pipeline = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    together = mpu.get_tensor_and_context_parallel_group()
    own_replica, me = replica_ranks(), dist.get_rank()
    control = None
    replicas = dist.get_process_group_ranks(mpu.get_data_parallel_group())
    for ranks in sorted([rank + other - me for rank in own_replica] for other in replicas):
        # Every rank makes every replica's group, in one order, as Megatron makes its own.
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
