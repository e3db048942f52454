"""Processes of a pipeline on this host, as benchmarks spawn them."""

import os
from pathlib import Path


def join_pipeline(rank: int, ranks: int, folder: str) -> None:
    """Make this process rank ``rank`` of a pipeline of ``ranks`` stages, with one thread.

    Megatron is importable without CUDA afterwards, so import it after this call.

    Args:
        rank: Global and pipeline rank of this process.
        ranks: Number of processes.
        folder: Empty folder of this host, in which the processes meet.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.set_num_threads(1)
    meeting = (Path(folder) / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)
