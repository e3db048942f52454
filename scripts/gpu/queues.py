#!/usr/bin/env python3
"""Overlap of an op with two waiting receives, by CUDA_DEVICE_MAX_CONNECTIONS, on one GPU.

    scripts/gpu/queues.py

Sleeping kernels replace the receives. The script also shows which calls make the host wait for the
device meanwhile.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CYCLES = 1_000_000_000  # about half a second


def behind_receives() -> None:
    import torch

    link = torch.cuda.Stream()
    x = torch.randn(512, 512, device="cuda")
    torch.mm(x, x)
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    done, began = torch.cuda.Event(), time.perf_counter()
    with torch.cuda.stream(link):
        torch.cuda._sleep(CYCLES)
        torch.cuda._sleep(CYCLES)
    torch.mm(x, x)
    done.record()
    done.synchronize()
    op = time.perf_counter() - began
    torch.cuda.synchronize()
    both = time.perf_counter() - began
    verdict = "runs beside them" if op < both / 4 else "WAITS FOR THEM"
    asked = os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    print(f"{asked} queues: the op was done after {op:.3f} s of {both:.3f}: it {verdict}")


def host_waits() -> None:
    import torch

    x = torch.randn(512, 512, device="cuda")
    link, kept = torch.cuda.Stream(), []

    def case(name: str, act: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(link):
            torch.cuda._sleep(CYCLES)
        began = time.perf_counter()
        act()
        held = time.perf_counter() - began
        torch.cuda.synchronize()
        verdict = "the host WAITED for the device" if held > 0.2 else "the host went on"
        print(f"{name}: {1e3 * held:.1f} ms, {verdict}")

    torch.cuda._sleep(1000)
    case("a kernel's first use", lambda: torch.erfinv(x))
    case("another product's first use", lambda: torch.mm(x.bfloat16(), x.bfloat16()))
    case("2 GiB that were not there", lambda: kept.append(torch.empty(2 << 30, device="cuda")))
    case("giving them back", lambda: (kept.clear(), torch.cuda.empty_cache()))
    case("first pinned memory", lambda: torch.empty(64 << 20, pin_memory=True))


def main() -> None:
    if len(sys.argv) > 1:
        from megatron_epp.mcore.patching import cpu_host

        cpu_host.install_where_wanted()
        {"receives": behind_receives, "host": host_waits}[sys.argv[1]]()
        return
    allocator = "expandable_segments:True"
    cases = [({"CUDA_DEVICE_MAX_CONNECTIONS": count}, "receives") for count in ("1", "8", "32")]
    cases += [
        ({"CUDA_MODULE_LOADING": loading, "PYTORCH_CUDA_ALLOC_CONF": allocator}, "host")
        for loading in ("LAZY", "EAGER")
    ]
    failed = 0
    for environment, what in cases:
        print(environment, flush=True)
        command = [sys.executable, __file__, what]
        try:
            done = subprocess.run(command, env={**os.environ, **environment}, timeout=60)
            failed += done.returncode != 0
        except subprocess.TimeoutExpired:
            print("it HANGS")
            failed += 1
    sys.exit(failed)


if __name__ == "__main__":
    main()
