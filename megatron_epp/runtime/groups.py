"""The process groups of elastic pipelines, and this rank's place in them."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_epp.ir import Payload
from megatron_epp.runtime.stage_peers import Peers


@dataclass(frozen=True, slots=True)
class Groups:
    """``control`` spans the world, on the host; so do those of ``payload``, one per direction,
    where a pipeline has more than one rank; ``peers`` the ranks that compute every op together: the
    tensor- and context-parallel ones of this place, of all replicas of a block; None where that is
    one rank. ``lockstep``: replicas of a block, which share the experts of a layer."""

    control: dist.ProcessGroup
    payload: dict[Payload, dist.ProcessGroup]
    pipeline_ranks: tuple[int, ...]  # global, of this rank's pipeline
    pipeline_rank: int  # this rank's place among them
    replica: int
    replicas: int
    leads: bool  # of its place's tensor- and context-parallel ranks, the one that reports
    timeout: timedelta  # after which who waits for another rank fails
    peers: Peers | None = None
    lockstep: int = 1

    @property
    def in_lockstep(self) -> tuple[int, ...]:
        """The ranks of other replicas and of this one that run every op together; none where
        replicas run freely."""
        if self.lockstep == 1 or self.peers is None:
            return ()
        return tuple(dist.get_process_group_ranks(self.peers.group))

    @property
    def pipeline_size(self) -> int:
        return len(self.pipeline_ranks)
