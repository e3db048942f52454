"""The process groups of elastic pipelines, and this rank's place in them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_epp.ir import Payload
from megatron_epp.runtime.link import connect


@dataclass(frozen=True, slots=True)
class Groups:
    """``control`` spans the world, on the host; ``payload`` the pipeline, one per direction."""

    control: dist.ProcessGroup
    payload: dict[Payload, dist.ProcessGroup]
    stage: int
    stages: int
    replica: int
    replicas: int
    leads: bool  # of its stage's tensor- and context-parallel ranks, the one that reports

    @classmethod
    def make(cls, device: torch.device) -> "Groups":
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
        stage = mpu.get_pipeline_model_parallel_rank()
        connect(payload, stage, len(pipeline), device)
        return cls(
            control=control,
            payload=payload,
            stage=stage,
            stages=len(pipeline),
            replica=mpu.get_data_parallel_rank(),
            replicas=mpu.get_data_parallel_world_size(),
            leads=mpu.get_tensor_model_parallel_rank() == 0
            and mpu.get_context_parallel_rank() == 0,
        )

    @property
    def pipeline_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
