"""Ranks that compute every op together, and their agreement when memory runs out.

    rank 0   F2 ... all-reduce ... done        rank 1   F2 ... out of memory: never joins

The ops issue collectives over these ranks, so a rank that leaves an op early blocks the other
ranks. The iteration can be repeated in two cases. In the first, an op exceeds a memory limit, which
is checked after the op. The ranks then exchange the results of the check. In the second, all ranks
run out of memory at the same place of an op, and no rank blocks. The second case is usual, because
the ranks hold tensors of equal sizes. If only some ranks fail within an op, the job must end.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.runtime.rebuilt import speaking
from megatron_epp.runtime.store_answer import answer_within

PEERS_PATIENCE_SECONDS = 30.0  # how long a failed rank waits for the others to fail too


class Peers:
    """Ranks that compute every op together.

    Args:
        group: group of these ranks.
        busy: groups over which the ops issue collectives; ``all_failed`` compares the number of
            these collectives.
        device: device of the tensors that are all-reduced over ``group``.
    """

    def __init__(
        self, group: dist.ProcessGroup, busy: Sequence[dist.ProcessGroup], device: torch.device
    ):
        self.group, self.busy, self.device = group, tuple(busy), device
        self._failures = 0

    def any(self, failed: bool) -> bool:
        """All-reduce ``failed`` after the same op on all ranks; return whether any rank failed."""
        flag = torch.tensor([float(failed)], device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag)

    def all_failed(self, what: str) -> bool:
        """Return whether all ranks failed in ``what`` after the same number of collectives.

        Call it on a rank that failed within ``what``. The ranks communicate through
        torch.distributed's store, so no collective is needed. If a rank does not answer within
        ``PEERS_PATIENCE_SECONDS``, the result is False.
        """
        self._failures += 1
        groups: Sequence[Any] = [speaking(group) for group in self.busy]
        issued = [group._get_sequence_number_for_group() for group in groups]
        store = dist.distributed_c10d._get_default_store()
        ranks = dist.get_process_group_ranks(self.group)
        keys = {rank: f"megatron_epp/no memory/{self._failures}/{rank}" for rank in ranks}
        local = f"{what} {issued}"
        deadline = time.monotonic() + PEERS_PATIENCE_SECONDS

        def are_equal() -> bool:
            store.set(keys[dist.get_rank()], local)
            while not store.check(list(keys.values())):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.05)
            return all(store.get(key).decode() == local for key in keys.values())

        return answer_within(2 * PEERS_PATIENCE_SECONDS, are_equal, otherwise=False)
