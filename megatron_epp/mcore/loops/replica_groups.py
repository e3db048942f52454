"""Process groups of one replica in a loop of others, made by its ranks alone.

Another loop may call its schedule on some replicas only, or at other times than they do (a pass of
log-probabilities): nothing here waits for a rank of another replica.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_epp.ir import Payload
from megatron_epp.mcore.process_groups import message_options
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
    mine = dist.get_rank()
    return tuple(sorted(peer + rank - mine for peer in together for rank in pipeline))


def make_replica_groups(device: torch.device, timeout: timedelta) -> Groups:
    """Collective over the replica's ranks, once Megatron has made its groups. ``control`` of the
    result spans the replica, and the groups of ``payload`` the pipeline.

    ValueError: torch.distributed was initialised in a way in which pipelines stand still.
    """
    if dist.distributed_c10d._get_default_group().bound_device_id is not None:
        raise ValueError("torch.distributed was initialised with a device_id")
    pipeline = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    together = mpu.get_tensor_and_context_parallel_group()
    control = _group(replica_ranks(), CONTROL, timeout, backend="gloo")
    payload: dict[Payload, dist.ProcessGroup] = {}
    if len(pipeline) > 1:
        for way in Payload:
            options = message_options(device, timeout)
            payload[way] = _group(pipeline, f"epp_{way.name.lower()}", timeout, pg_options=options)
    stage = mpu.get_pipeline_model_parallel_rank()
    own = [dist.get_group_rank(group, rank) for group in payload.values() for rank in pipeline]
    stages = tuple(own[: len(pipeline)]) or (0,)  # alike in both groups
    connect(payload, stage, len(pipeline), device, stages)
    busy = mpu.get_tensor_model_parallel_group(), mpu.get_context_parallel_group()
    return Groups(
        control=control,
        payload=payload,
        pipeline_ranks=stages,
        stage=stage,
        replica=0,
        replicas=1,
        leads=mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0,
        timeout=timeout,
        peers=Peers(together, busy, device) if together.size() > 1 else None,
    )


def _group(ranks: Any, name: str, timeout: timedelta, **how: Any) -> dist.ProcessGroup:
    return dist.new_group(
        list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name, **how
    )
