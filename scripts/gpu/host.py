#!/usr/bin/env python3
"""Report of a GPU host's software, and of how a training process starts CUDA there.

The exit status is 1 if something would stop training or make it wait: an old driver, one hardware
queue, or an allocator without expandable segments.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron_epp.mcore.patching import cpu_host, cuda_host


def norms_run() -> str:
    """Return the error of a norm's forward and backward, or "" if they run.

    Norms of an even and of an odd number of rows are tested. NVRTC compiles both on first use, with
    CUDA's headers and builtins.
    """
    try:
        from transformer_engine.pytorch import LayerNormLinear

        for rows in (64, 63):
            layer = LayerNormLinear(256, 256, normalization="RMSNorm", params_dtype=torch.bfloat16)
            x = torch.ones(rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            layer(x).float().sum().backward()
    except (ImportError, OSError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return ""


def nvrtc() -> str:
    """Return the loaded NVRTC libraries, which compile Transformer Engine's norms, as text."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return "unknown"
    return " ".join(sorted({line.split()[-1] for line in lines if "nvrtc" in line})) or "none"


def main() -> int:
    try:
        cuda_host.prepare(["--epp"])
        cpu_host.install_cpu_host()
    except ValueError as error:
        print(f"wrong: {error}")
        return 1
    if not cpu_host.has_gpu_kernels():
        print("wrong: no CUDA GPU here")
        return 1
    before, total = torch.cuda.mem_get_info()
    emulated = ", emulated" * ("EPP_ENGINE" in os.environ)
    print(f"gpus {torch.cuda.device_count()} x {torch.cuda.get_device_name()}{emulated}")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}")
    print(f"context and eagerly loaded kernels: {(total - before) / 2**20:.0f} MiB")
    for name in ("CUDA_MODULE_LOADING", *cuda_host.ALLOCATOR, *cuda_host.CUDNN):
        print(f"{name}={os.environ.get(name)}")
    held = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
    segments = torch.cuda.memory_snapshot()
    expandable = [segment.get("is_expandable", False) for segment in segments]
    print(f"segments {len(segments)}, expandable {sum(expandable)}, tensors {len(held)}")
    try:
        import transformer_engine

        print(f"Transformer Engine {transformer_engine.__version__}")
    except (ImportError, OSError) as error:
        print(f"Transformer Engine: none ({error})")
    else:
        if problem := norms_run():
            print(f"wrong: Transformer Engine's norms: {problem}")
            return 1
    # Triton, and with it Megatron's compiled fusions, wants the first two.
    header = Path(sysconfig.get_path("include"), "Python.h")
    found = {"cc": shutil.which("cc"), "Python.h": header.exists() and header}
    for name, path in (*found.items(), ("nvcc", shutil.which("nvcc"))):
        print(f"{name}: {path or None}")
    print(f"NVTE_CUDA_INCLUDE_DIR={os.environ.get('NVTE_CUDA_INCLUDE_DIR')}, NVRTC {nvrtc()}")
    if missing := [name for name, path in found.items() if not path]:
        print(
            f"wrong: {' and '.join(missing)} missing, which fusions are compiled with; install a C "
            "compiler and Python's headers, or export TORCHDYNAMO_DISABLE=1 (slower)"
        )
        return 1
    if not all(expandable):
        print("wrong: the allocator's segments are not expandable")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
