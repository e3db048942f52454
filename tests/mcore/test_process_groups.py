"""Groups: few, with the user's timeout, spoken on before the first plan; ranks of one host."""

import os
from argparse import Namespace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.runtime.world import run

MINUTES = 7


def make(rank: int) -> list[dict[str, Any]]:
    """The groups of two stages, and of two tensor-parallel ranks."""
    from megatron.core import parallel_state as mpu
    from megatron.training.global_vars import set_args

    from megatron_epp.mcore.job import process_groups
    from tests.certify.comm_recorder import Traffic

    set_args(
        Namespace(
            distributed_timeout_minutes=MINUTES,
            use_distributed_optimizer=False,
            untie_embeddings_and_output_weights=False,
            num_experts=None,
            high_priority_stream_groups=["tp", "ep"],
        )
    )
    said: list[str] = []
    process_groups.logger.info = lambda text, *words: said.append(text % words)  # type: ignore[method-assign]
    cpu, found, plain = torch.device("cpu"), [], dist.new_group
    for tp, pp in ((1, 2), (2, 1)):
        mpu.initialize_model_parallel(tp, pp)
        made: list[Any] = []

        def new_group(*args: Any, made: list = made, **kwargs: Any) -> Any:
            made.append(plain(*args, **kwargs))
            return made[-1]

        dist.new_group = new_group
        with Traffic() as traffic:
            groups = process_groups.make_groups(cpu)
        dist.new_group = plain
        found.append(
            {
                "made": [group.group_desc for group in made],
                "timeouts": [group._get_backend(cpu).options._timeout for group in made],
                "timeout": groups.timeout,
                "said": list(said),
                "pipeline": groups.pipeline_ranks,
                "peers": groups.peers is not None and groups.peers.any(rank == 0),
                "messages": [(message.way, message.peer) for message in traffic.messages],
                "spoken on": [collective.group for collective in traffic.collectives],
            }
        )
        mpu.destroy_model_parallel()
    return found


@pytest.mark.everything
def test_groups_of_two_stages_and_of_two_peers(tmp_path) -> None:
    found = run(2, make, tmp_path)
    assert all(isinstance(one, list) for one in found), found
    minutes = timedelta(minutes=MINUTES)
    ways = ("send", "receive")
    for rank, (stages, peers) in enumerate(found):
        assert stages["made"] == ["epp_control", "epp_activation", "epp_gradient"]
        assert stages["timeouts"] == [minutes] * 3
        assert stages["timeout"] == minutes
        line = "streams of high priority (--high-priority-stream-groups): tp ep"
        assert stages["said"] == []
        assert peers["said"] == ([line] if rank == 0 else [])
        assert stages["pipeline"] == (0, 1)
        assert stages["messages"] == [(ways[rank], 1 - rank), (ways[1 - rank], 1 - rank)]
        assert stages["spoken on"] == [
            "PIPELINE_MODEL_PARALLEL_GROUP", "MODEL_PARALLEL_GROUP", "default_pg", "EMBEDDING_GROUP"
        ]  # fmt: skip
        assert not stages["peers"]
        assert peers["made"] == ["epp_control"]
        assert peers["messages"] == []
        assert peers["spoken on"] == [
            "TENSOR_MODEL_PARALLEL_GROUP", "MODEL_PARALLEL_GROUP", "default_pg"
        ]  # fmt: skip
        assert peers["peers"]  # one of them failed, and both know


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL")
def test_messages_hold_few_blocks_of_a_gpu(monkeypatch) -> None:
    from megatron_epp.mcore.job.process_groups import message_options

    def world(of_gpus: str) -> None:
        """A mixed one, as "cpu:gloo,cuda:nccl" makes it."""
        names = {"cpu": "gloo", "cuda": of_gpus}
        default = SimpleNamespace(
            _get_backend=lambda device: SimpleNamespace(name=lambda: names[device.type])
        )
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: default)

    world("nccl")
    options = message_options(torch.device("cuda"), timedelta(minutes=MINUTES))
    assert (options.config.min_ctas, options.config.max_ctas) == (1, 2)
    assert options.is_high_priority_stream and options._timeout == timedelta(minutes=MINUTES)
    assert message_options(torch.device("cpu"), timedelta(minutes=MINUTES)) is None
    world("gloo")  # ranks that share a GPU
    assert message_options(torch.device("cuda"), timedelta(minutes=MINUTES)) is None


def mixed(rank: int) -> tuple[str, Any]:
    """The name of a world with a back end for each device, and how its messages go."""
    from megatron_epp.mcore.job.process_groups import message_options

    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=0, world_size=1)
    return dist.get_backend(), message_options(torch.device("cuda"), timedelta(minutes=MINUTES))


@pytest.mark.everything
def test_a_world_of_mixed_back_ends_is_asked_for_its_gpus(tmp_path) -> None:
    assert run(1, mixed, tmp_path) == [("cpu:gloo,cuda:gloo", None)]


# ------------------------------------------------------------------ ranks that share a host


GROUPS = 8


def threads_of_groups() -> tuple[int, timedelta]:
    """Threads that came with as many groups; the timeout of one of them, over which ranks speak."""
    before = len(os.listdir("/proc/self/task"))
    groups = [dist.new_group([0, 1], timeout=timedelta(minutes=MINUTES)) for _ in range(GROUPS)]
    for group in groups:
        sent = torch.ones(1)
        dist.all_reduce(sent, group=group)
        assert sent.item() == 2
    backend = groups[-1]._get_backend(torch.device("cpu"))
    return len(os.listdir("/proc/self/task")) - before, backend.options._timeout


def share(rank: int) -> dict[str, Any]:
    from megatron_epp.mcore.patching.gloo import share_gloo_device

    plain, _ = threads_of_groups()
    share_gloo_device()
    threads_of_groups()  # the first of them makes the device
    shared, timeout = threads_of_groups()
    return {"plain": plain, "shared": shared, "timeout": timeout}


def test_groups_share_one_device_and_its_thread(tmp_path) -> None:
    for found in run(2, share, tmp_path):
        assert isinstance(found, dict), found
        assert found["plain"] - found["shared"] == GROUPS
        assert found["timeout"] == timedelta(minutes=MINUTES)


@pytest.mark.parametrize(("alone", "layers"), [(True, 3), (False, 0)])
def test_what_others_would_wait_for_is_not_run_meanwhile(monkeypatch, alone, layers) -> None:
    """Whether the others have come is asked before every layer, and not at all with company."""
    from megatron_epp.mcore.calibrate import measure

    come, runs = iter((False, False, False, True)), []
    met = SimpleNamespace(is_completed=lambda: next(come), wait=lambda: runs.append("met"))
    monkeypatch.setattr(measure.dist, "barrier", lambda group, async_op: met)
    probe: Any = SimpleNamespace(computes_alone=alone, layers=lambda *_: runs.append("layer"))
    measure._meet(probe, SimpleNamespace(control=None))
    assert runs == ["layer"] * layers + ["met"]
