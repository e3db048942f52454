"""The process groups of elastic pipelines, and this rank's place in them."""

from collections import Counter
from collections.abc import Sequence
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
    one rank. ``lockstep``: replicas of a block, which share the experts of a layer.

    ``block`` is the ranks of this replica and of those in lockstep with it, on the host; its rank
    ``planner`` has the planner processes, as so many ranks of its host have for other blocks
    (``planners_here``). None: the world is one block, which rank 0 plans for.
    """

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
    block: dist.ProcessGroup | None = None
    planner: int = 0
    planners_here: int = 1

    @property
    def planned_together(self) -> dist.ProcessGroup:
        """The ranks that get the plans of this replica."""
        return self.control if self.block is None else self.block

    @property
    def plans(self) -> bool:
        """Whether this rank has the plans of its replica made."""
        return self.planned_together.rank() == self.planner

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


def planning_ranks(hosts: Sequence[str], blocks: Sequence[int]) -> dict[int, int]:
    """Return the rank that plans for each block: on one of its hosts, as few on each as can be.

    Args:
        hosts: of every rank of the world.
        blocks: that every rank is in.
    """
    chosen: dict[int, int] = {}
    taken: Counter[str] = Counter()
    for block in sorted(set(blocks)):
        ranks = [rank for rank, other in enumerate(blocks) if other == block]
        chosen[block] = min(ranks, key=lambda rank: (taken[hosts[rank]], rank))
        taken[hosts[chosen[block]]] += 1
    return chosen
