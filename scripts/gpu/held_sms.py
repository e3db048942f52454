#!/usr/bin/env python3
"""Slowdown of a layer's products and attention while a message waits on the same GPU.

    scripts/gpu/held_sms.py [--tokens 8192] [--hidden 4096] [--ffn 14336] [--heads 32]

A kernel of 1 to 8 spinning thread blocks, with as much shared memory as NCCL's, replaces the
message. The output is by shape, and by the number of SMs that products leave free
(NVTE_EXT_MARGIN_SM, and torch's carve-out for products outside of Transformer Engine; for norms,
NVTE_FWD_LAYERNORM_SM_MARGIN and NVTE_BWD_LAYERNORM_SM_MARGIN). Each number of SMs is measured in a
new process.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

MARGINS, BLOCKS, REPEATS = (0, 4, 8), (0, 1, 2, 4, 8), 20
SHARED_BYTES, THREADS = 96 << 10, 640
# Until the host says so, a second at most. As in NCCL's kernels, one thread polls the device's
# memory and the others wait at a barrier.
KERNEL = """
extern "C" __global__ void hold(volatile int* over) {
    extern __shared__ volatile char held[];
    unsigned long long began, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
    if (threadIdx.x == 0) {
        do {
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        } while (!*over && now - began < 1000000000ull);
    }
    __syncthreads();
    held[threadIdx.x] = 1;
}
"""


def measure(wanted: argparse.Namespace) -> None:
    import torch

    from megatron_epp.mcore.patching import cpu_host, emulated_engine

    if emulated_engine.is_wanted():
        cpu_host.install_cpu_host()
    margin = int(os.environ.get("NVTE_EXT_MARGIN_SM", "0"))
    if margin:
        torch._C._set_sm_carveout_experimental(margin)
    cases = layers(wanted)
    hold = torch.cuda._compile_kernel(KERNEL, "hold")
    hold.set_shared_memory_config(SHARED_BYTES)
    over = torch.zeros(1, dtype=torch.int32, device="cuda")
    one = torch.ones(1, dtype=torch.int32).pin_memory()
    side, copies = torch.cuda.Stream(), torch.cuda.Stream()

    def milliseconds(act: Callable[[], object], blocks: int) -> float:
        act()  # whatever its first use makes the device wait for
        over.zero_()
        torch.cuda.synchronize()
        if blocks:
            with torch.cuda.stream(side):
                hold((blocks, 1, 1), (THREADS, 1, 1), [over], shared_mem=SHARED_BYTES, stream=side)
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(REPEATS):
            act()
        done.record()
        done.synchronize()
        with torch.cuda.stream(copies):
            over.copy_(one, non_blocking=True)
        torch.cuda.synchronize()
        return began.elapsed_time(done) / REPEATS

    for name, act in cases.items():
        alone = milliseconds(act, 0)
        beside = [milliseconds(act, blocks) / alone for blocks in BLOCKS[1:]]
        print(
            f"margin {margin}: {name}: {alone:.3f} ms alone; beside "
            + ", ".join(f"{n} blocks {x:.3f}" for n, x in zip(BLOCKS[1:], beside, strict=True)),
            flush=True,
        )


def layers(wanted: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Return functions to time: products (forward; forward and backward), norms and attention."""
    import torch

    try:
        from transformer_engine.pytorch import Linear
    except (ImportError, OSError) as error:
        print(f"products by torch: no Transformer Engine ({error})")
        Linear = torch.nn.Linear  # noqa: N806
    tokens, hidden, ffn = wanted.tokens, wanted.hidden, wanted.ffn
    options = {"device": "cuda", "dtype": torch.bfloat16}
    made: dict[str, Callable[[], object]] = {}
    shapes = {"qkv": (hidden, 3 * hidden), "out": (hidden, hidden)}
    shapes |= {"up": (hidden, 2 * ffn), "down": (ffn, hidden)}
    for name, (inputs, outputs) in shapes.items():
        x = torch.ones(tokens, inputs, **options).requires_grad_()
        gradient = torch.ones(tokens, outputs, **options)
        linear = Linear(inputs, outputs, bias=False)
        linear = linear.to("cuda", torch.bfloat16)

        def both(linear=linear, x=x, gradient=gradient) -> None:
            linear(x).backward(gradient)

        made[f"{name} [{tokens}, {inputs}] x [{inputs}, {outputs}], forward"] = (
            lambda linear=linear, x=x: linear(x)
        )
        made[f"{name}, forward and backward"] = both
    norms(wanted, options, made)
    size = hidden // wanted.heads
    q = torch.ones(1, wanted.heads, tokens, size, **options)
    made[f"attention, {wanted.heads} heads of {size}, {tokens} tokens, forward"] = lambda: (
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    )
    return made


def norms(wanted: argparse.Namespace, options: dict, made: dict) -> None:
    """Add RMSNorms of the model's width and of 7/4 of this width to the functions ``made``.

    The backward of wide norms (7168 columns) is a cooperative kernel.
    """
    import torch

    try:
        from transformer_engine.pytorch import RMSNorm
    except (ImportError, OSError):
        return
    for hidden, rows in ((wanted.hidden, 0), (wanted.hidden, 1), (wanted.hidden // 4 * 7, 0)):
        tokens = wanted.tokens - rows  # a number that is odd takes other kernels
        x = torch.ones(tokens, hidden, **options).requires_grad_()
        gradient = torch.ones(tokens, hidden, **options)
        norm = RMSNorm(hidden, params_dtype=torch.bfloat16, device="cuda:0")

        def both(norm=norm, x=x, gradient=gradient) -> None:
            norm(x).backward(gradient)

        made[f"norm [{tokens}, {hidden}], forward"] = lambda norm=norm, x=x: norm(x)
        made[f"norm [{tokens}, {hidden}], forward and backward"] = both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("tokens", 8192), ("hidden", 4096), ("ffn", 14336), ("heads", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--margins", type=int, nargs="+", default=MARGINS, help="SMs left free (default: 0 4 8)"
    )
    parser.add_argument("--measure", action="store_true", help="in this process, as it stands")
    wanted = parser.parse_args()
    if wanted.measure:
        measure(wanted)
        return
    from megatron_epp.mcore.patching.cuda_host import MARGIN, NORM_MARGINS

    failed, names = 0, (MARGIN, *NORM_MARGINS)
    for margin in wanted.margins:
        environment = {name: value for name, value in os.environ.items() if name not in names}
        environment |= dict.fromkeys(names, str(margin)) if margin else {}
        command = [sys.executable, __file__, "--measure", *sys.argv[1:]]
        failed += subprocess.run(command, env=environment, timeout=120).returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
