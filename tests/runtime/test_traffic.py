"""What goes over process groups is seen whoever asks for it, and however it was imported."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import all_reduce, broadcast, irecv, isend
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.runtime.world import run


def talk(rank: int) -> dict[str, Any]:
    from tests.certify.comm_recorder import Traffic

    group = dist.new_group(group_desc="talkers")
    ones = torch.ones(3)
    with Traffic() as traffic:
        dist.all_reduce(ones, group=group)
        all_reduce(ones)
        broadcast(ones, 0, group=group)
        dist.all_gather_into_tensor(torch.empty(6), ones, group=group)
        dist.reduce_scatter_tensor(torch.empty(3), torch.ones(6), group=group)
        dist.all_gather([torch.empty(3), torch.empty(3)], ones, group=group)
        with _coalescing_manager(group):
            dist.all_reduce(ones, group=group)
            dist.all_reduce(torch.ones(5), group=group)
        dist.barrier(group)
        objects: list = [None, None]
        dist.all_gather_object(objects, rank, group=group)
        if rank == 0:
            isend(torch.ones(4), group=group, group_dst=1).wait()
        else:
            irecv(torch.ones(4), group=group, group_src=0).wait()
    dist.all_reduce(ones)
    return {
        "collectives": [(c.operation, c.group, c.caller) for c in traffic.collectives],
        "messages": [(m.way, m.group, m.peer, m.elements) for m in traffic.messages],
    }


def test_everything_is_seen(tmp_path) -> None:
    first, second = run(2, talk, tmp_path)
    assert first["messages"] == [("send", "talkers", 1, 4)]
    assert second["messages"] == [("receive", "talkers", 0, 4)]
    assert first["collectives"] == second["collectives"]
    operations = [operation for operation, _, _ in first["collectives"]]
    assert operations == [
        "allreduce",
        "allreduce",
        "broadcast",
        "allgather_base",
        "reduce_scatter_base",
        "allgather",
        "allreduce_coalesced",
        "barrier",
        # of objects: their sizes, then themselves
        "allgather",
        "allgather",
    ]
    groups = [group for _, group, _ in first["collectives"]]
    assert groups == ["talkers", "default_pg"] + ["talkers"] * 8
    # The function that asked, not torch's own beneath it.
    assert {caller for _, _, caller in first["collectives"]} == {"tests.runtime.test_traffic.talk"}
