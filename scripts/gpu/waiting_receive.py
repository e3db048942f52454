#!/usr/bin/env python3
"""Slowdown of matrix products while a receive waits, because its kernel occupies SMs.

    torchrun --standalone --nproc-per-node 2 scripts/gpu/waiting_receive.py [--size 8192]

Rank 1 posts receives of 64 MiB and computes products; rank 0 sends only afterwards. The output is
by the largest number of thread blocks (``max_ctas``) that NCCL may use for a message, and by the
number of SMs that products leave free. The products are Transformer Engine's, because those of
torch 2.11 call cuBLAS without a limit of SMs.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_epp.mcore.patching import cpu_host, cuda_host
from megatron_epp.te_reference import reference_switch

PRODUCTS, ROUNDS = 20, 3
MOST_BLOCKS = (None, 1, 2, 4, 8, 16, 32)
LEFT_FREE = (None, 8)


def products(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a linear layer that leaves as many SMs free as the environment says."""
    try:
        from transformer_engine.pytorch import Linear
    except ImportError as error:
        print(f"products by torch leave none free: {error}", file=sys.stderr)
        return lambda x: torch.mm(x, x)
    return Linear(size, size, bias=False, params_dtype=torch.bfloat16, device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=8192, help="of the products' matrices")
    parser.add_argument("--elements", type=int, default=32 << 20, help="of a message")
    wanted = parser.parse_args()
    cpu_host.install_where_wanted()
    backend = "gloo" if reference_switch.is_wanted() else "nccl"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    rank, gloo = dist.get_rank(), dist.new_group(backend="gloo")
    x = torch.ones(wanted.size, wanted.size, device="cuda", dtype=torch.bfloat16)
    message = torch.zeros(wanted.elements, device="cuda", dtype=torch.bfloat16)

    linear = products(wanted.size)

    def seconds(group: dist.ProcessGroup | None, receives: int) -> float:
        best = float("inf")
        for _ in range(ROUNDS):
            works = []
            if rank == 1 and group is not None:
                works = [dist.irecv(message, group_src=0, group=group) for _ in range(receives)]
            torch.cuda.current_stream().synchronize()
            time.sleep(0.05)
            began, done = time.perf_counter(), torch.cuda.Event()
            for _ in range(PRODUCTS):
                linear(x)
            done.record()
            done.synchronize()
            best = min(best, time.perf_counter() - began)
            dist.barrier(gloo)  # the other rank sends only now
            if rank == 0 and group is not None:
                for _ in range(receives):
                    dist.send(message, group_dst=1, group=group)
            for work in works:
                work.wait()
            torch.cuda.synchronize()
            dist.barrier(gloo)
        return best

    seconds(None, 0)
    alone = seconds(None, 0)
    for most in MOST_BLOCKS:
        options = dist.ProcessGroupNCCL.Options() if backend == "nccl" else None
        if most is not None and options is not None:
            options.config.max_ctas, options.config.min_ctas = most, 1
        group = dist.new_group([0, 1], backend=backend, pg_options=options)
        # The first message makes the communicator, in which each end waits for the other.
        if rank == 0:
            dist.send(message, group_dst=1, group=group)
        else:
            dist.recv(message, group_src=0, group=group)
        for left_free in LEFT_FREE:
            os.environ[cuda_host.MARGIN] = str(left_free or 0)
            linear = products(wanted.size)
            for receives in (1, 2):
                beside = seconds(group, receives)
                if rank == 1:
                    print(
                        f"max_ctas {most or 'default'}, {left_free or 0} SMs left free, {receives} "
                        f"receives wait: products take {beside / alone:.3f} of their time alone",
                        flush=True,
                    )
        dist.destroy_process_group(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
