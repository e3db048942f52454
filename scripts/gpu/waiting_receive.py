#!/usr/bin/env python3
"""How much slower products are while a receive waits beside them: SMs that its kernel holds.

    torchrun --standalone --nproc-per-node 2 scripts/gpu/waiting_receive.py

Rank 1 posts receives of 64 MiB, multiplies, and only then is sent something; by the most thread
blocks (``max_ctas``) that NCCL may take for a message.
"""

import os
import time

import torch
import torch.distributed as dist

SIZE, PRODUCTS, ROUNDS = 8192, 20, 3


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    gloo = dist.new_group(backend="gloo")
    x = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    message = torch.empty(32 << 20, device="cuda", dtype=torch.bfloat16)

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
                torch.mm(x, x)
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
    for most in (None, 1, 2, 4, 8, 16, 32):
        options = dist.ProcessGroupNCCL.Options()
        if most is not None:
            options.config.max_ctas, options.config.min_ctas = most, 1
        group = dist.new_group([0, 1], backend="nccl", pg_options=options)
        seconds(group, 1)  # makes the communicator
        for receives in (1, 2):
            beside = seconds(group, receives)
            if rank == 1:
                print(
                    f"max_ctas {most or 'default'}, {receives} receives wait: products take "
                    f"{beside / alone:.3f} of their time alone",
                    flush=True,
                )
        dist.destroy_process_group(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
