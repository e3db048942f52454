"""Process groups of elastic pipelines, and this rank's place in them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_epp.ir import Payload
from megatron_epp.runtime.stage_peers import Peers


@dataclass(frozen=True, slots=True)
class Groups:
    """Process groups of a rank, and its place in its pipeline.

    In an external training loop, ``control``, ``replica`` and ``replicas`` refer only to the
    replicas that run in lockstep with this rank's replica, or to this replica alone.

    Attributes:
        control: CPU group of all ranks of the world.
        payload: for each payload (kind of message), one group of all ranks of the world; empty if
            the pipeline has one rank.
        pipeline_ranks: global ranks of this pipeline.
        pipeline_rank: index of this rank in ``pipeline_ranks``.
        replica: number of this rank's replica.
        replicas: number of replicas.
        leads: whether this rank reports for the tensor- and context-parallel ranks of its stage.
        timeout: maximum time that a rank waits for another rank before it fails.
        peers: ranks that compute every op together: tensor- and context-parallel ranks of the
            stage, in all replicas of a lockstep group (block). None if this rank is the only one.
        lockstep: number of replicas of a block, over which a layer's experts are sharded.
        block: CPU group of the ranks of this replica's block; None if the world is one block.
        planner: rank in :attr:`planned_together` that runs the planner processes.
        planners_here: number of ranks of this host that run planner processes.
    """

    control: dist.ProcessGroup
    payload: dict[Payload, dist.ProcessGroup]
    pipeline_ranks: tuple[int, ...]
    pipeline_rank: int
    replica: int
    replicas: int
    leads: bool
    timeout: timedelta
    peers: Peers | None = None
    lockstep: int = 1
    block: dist.ProcessGroup | None = None
    planner: int = 0
    planners_here: int = 1

    @property
    def planned_together(self) -> dist.ProcessGroup:
        """CPU group over which the plans of this replica are broadcast."""
        return self.control if self.block is None else self.block

    @property
    def plans(self) -> bool:
        """Whether this rank runs the planner processes of its block."""
        return self.planned_together.rank() == self.planner

    @property
    def in_lockstep(self) -> tuple[int, ...]:
        """Global ranks that run every op together in all replicas of the block.

        The tuple is empty without lockstep.
        """
        if self.lockstep == 1 or self.peers is None:
            return ()
        return tuple(dist.get_process_group_ranks(self.peers.group))

    @property
    def pipeline_size(self) -> int:
        """Number of ranks of the pipeline."""
        return len(self.pipeline_ranks)


def planning_ranks(hosts: Sequence[str], blocks: Sequence[int]) -> dict[int, int]:
    """Return, for each lockstep group (block), the global rank that runs its planner.

    Ranks are chosen so that planners are distributed evenly over the hosts.

    Args:
        hosts: host of every rank of the world.
        blocks: number of the block of every rank of the world.
    """
    chosen: dict[int, int] = {}
    taken: Counter[str] = Counter()
    for block in sorted(set(blocks)):
        ranks = [rank for rank, other in enumerate(blocks) if other == block]
        chosen[block] = min(ranks, key=lambda rank: (taken[hosts[rank]], rank))
        taken[hosts[chosen[block]]] += 1
    return chosen
