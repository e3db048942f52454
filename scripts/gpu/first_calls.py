#!/usr/bin/env python3
"""Time of attention's first calls: the one-time cost of a kernel for a new size, and later calls.

scripts/gpu/first_calls.py [--heads 32 --groups 8 --size 128] [--longest TOKENS]
"""

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# (documents, queries of each, keys of each)
SHAPES = (
    *((1, tokens, tokens) for tokens in (1024, 1500, 2048, 4096, 8192)),
    *((1, 2048, keys) for keys in (10240, 34816, 67584)),
    *((8, 256, 256), (40, 200, 200), (1, 300, 5000)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("heads", 32), ("groups", 8), ("size", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--longest", type=int, help="contexts longer than that are left out")
    wanted = parser.parse_args()
    shapes = [one for one in SHAPES if wanted.longest is None or one[2] <= wanted.longest]

    import torch

    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_where_wanted()
    from megatron_epp.layers.attention.varlen import CuSeqlens, Operands
    from megatron_epp.mcore.model.attention import attention_for

    device = torch.device("cuda")
    config = SimpleNamespace(
        num_attention_heads=wanted.heads,
        num_query_groups=wanted.groups,
        kv_channels=wanted.size,
        softmax_scale=None,
        num_layers=1,
        softmax_type="vanilla",
        window_size=None,
        window_attn_skip_freq=None,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        params_dtype=torch.bfloat16,
    )

    def draw(rows: int, heads: int):
        return torch.randn(rows, heads, wanted.size, device=device, dtype=torch.bfloat16)

    for name in ("te", "torch"):
        try:
            kernel = attention_for(name, config, device).kernel
        except ValueError as error:
            print(f"{name}: {error}")
            continue
        once = 0.0
        for documents, queries, keys in shapes:
            cu_seqlens = CuSeqlens.of([queries] * documents, [keys] * documents, device)
            rows, all_keys = documents * queries, documents * keys
            call = Operands(
                draw(rows, wanted.heads),
                draw(all_keys, wanted.groups),
                draw(all_keys, wanted.groups),
                cu_seqlens,
            )
            gradient, seconds = draw(rows, wanted.heads), []
            for _ in range(4):
                torch.cuda.synchronize()
                began = time.perf_counter()
                _, kept = kernel.forward(call, True)
                kernel.backward(gradient, call, kept)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            later = min(seconds[1:])
            once += seconds[0] - later
            print(
                f"{name}: {documents} x {queries} queries, {keys} keys: first {seconds[0]:.3f} s, "
                f"then {1e3 * later:.3f} ms",
                flush=True,
            )
        print(f"{name}: first calls cost {once:.1f} s more than later ones, {len(shapes)} shapes")


if __name__ == "__main__":
    main()
