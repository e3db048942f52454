"""The process groups of elastic pipelines, made from Megatron's."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_epp.ir import Payload
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.link import connect
from megatron_epp.runtime.stage_peers import Peers


def make_groups(device: torch.device) -> Groups:
    """Collective: every rank calls it once, after Megatron has made its groups."""
    control = dist.new_group(backend="gloo", group_desc="epp_control")
    pipeline = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, tuple(pipeline), group=control)
    payload: dict[Payload, dist.ProcessGroup] = {}
    # new_group is collective over the world: all ranks make all groups in one order.
    for ranks in sorted(set(every)):
        for direction in Payload:
            name = f"epp_{direction.name.lower()}"
            group = dist.new_group(list(ranks), group_desc=name) if len(ranks) > 1 else None
            if ranks == tuple(pipeline) and group is not None:
                payload[direction] = group
    together = dist.get_process_group_ranks(mpu.get_tensor_and_context_parallel_group())
    dist.all_gather_object(every, tuple(together), group=control)
    peers = None
    for ranks in sorted(set(every)):
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), backend="gloo", group_desc="epp_stage")
            if ranks == tuple(together):
                busy = mpu.get_tensor_model_parallel_group(), mpu.get_context_parallel_group()
                peers = Peers(group, busy)
    stage = mpu.get_pipeline_model_parallel_rank()
    connect(payload, stage, len(pipeline), device)
    return Groups(
        control=control,
        payload=payload,
        pipeline_ranks=tuple(pipeline),
        stage=stage,
        replica=mpu.get_data_parallel_rank(),
        replicas=mpu.get_data_parallel_world_size(),
        leads=mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0,
        peers=peers,
    )
