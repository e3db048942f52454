"""The process groups of elastic pipelines, and this rank's place in them."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_epp.ir import Payload
from megatron_epp.runtime.stage_peers import Peers


@dataclass(frozen=True, slots=True)
class Groups:
    """``control`` spans the world, on the host; so do those of ``payload``, one per direction,
    where there is more than one stage; ``peers`` the tensor- and context-parallel ranks of the
    stage, None where it has one rank."""

    control: dist.ProcessGroup
    payload: dict[Payload, dist.ProcessGroup]
    pipeline_ranks: tuple[int, ...]  # global, by stage
    stage: int
    replica: int
    replicas: int
    leads: bool  # of its stage's tensor- and context-parallel ranks, the one that reports
    timeout: timedelta  # after which who waits for another rank fails
    peers: Peers | None = None

    @property
    def stages(self) -> int:
        return len(self.pipeline_ranks)
