"""Ranks that compute every op together: where one has no memory, none of them may go on.

    rank 0   F2 ... all-reduce ... done        rank 1   F2 ... no memory: never joins

Inside an op they meet in the collectives of its layers, so a rank that leaves an op half-way leaves
the others waiting. Two cases can be survived. A limit is checked when the op is done, where they
can ask each other. And memory that runs out at the same place on all of them, which is the rule, as
they hold the same: nobody waits then. Whoever fails alone must end the job.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.runtime.rebuilt import speaking

PEERS_PATIENCE_SECONDS = 30.0  # how long a rank that failed waits for the others to fail, too


class Peers:
    """``group``: these ranks. ``busy``: the groups whose collectives ops issue. ``device``: where
    tensors must lie to go over ``group``."""

    def __init__(
        self, group: dist.ProcessGroup, busy: Sequence[dist.ProcessGroup], device: torch.device
    ):
        self.group, self.busy, self.device = group, tuple(busy), device
        self._failures = 0

    def any(self, failed: bool) -> bool:
        """Whether one of them failed; every one asks, at the same op."""
        flag = torch.tensor([float(failed)], device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag)

    def all_failed(self, what: str) -> bool:
        """On a rank that failed in the midst of ``what``: whether all others did, after as many
        collectives. Needs nothing of a rank that has not failed."""
        self._failures += 1
        groups: Sequence[Any] = [speaking(group) for group in self.busy]
        issued = [group._get_sequence_number_for_group() for group in groups]
        store = dist.distributed_c10d._get_default_store()
        ranks = dist.get_process_group_ranks(self.group)
        keys = {rank: f"megatron_epp/no memory/{self._failures}/{rank}" for rank in ranks}
        local = f"{what} {issued}"
        store.set(keys[dist.get_rank()], local)
        deadline = time.monotonic() + PEERS_PATIENCE_SECONDS
        while not store.check(list(keys.values())):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return all(store.get(key).decode() == local for key in keys.values())
