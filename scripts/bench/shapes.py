"""Models of the GPU benchmarks, by name, as Megatron's flags."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from headline import ROOT

_LLAMA = """
    --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
"""
# name: (layers, flags)
MODELS: dict[str, tuple[int, str]] = {
    "llama-7b": (
        32,
        "--hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --vocab-size 31999",
    ),
    "llama-13b": (
        40,
        "--hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 --vocab-size 31999",
    ),
    "llama3-8b": (
        32,
        "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --vocab-size 128255",
    ),
    # To try a benchmark on a laptop's CPU.
    "tiny": (
        8,
        "--hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 "
        "--group-query-attention --num-query-groups 2 --vocab-size 255",
    ),
}


def flags(model: str, layers: int, context: int, on_gpu: bool, others: Sequence[str]) -> list[str]:
    """Return Megatron's flags for a stage of ``layers`` layers, followed by ``others``."""
    text = f"""
        {MODELS[model][1]} {_LLAMA} --num-layers {layers}
        --seq-length {context} --max-position-embeddings {context}
        --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-4 --eval-iters 0
        --tokenizer-type NullTokenizer
    """
    gpu = ["--bf16"] if on_gpu else []
    return [*text.split(), *gpu, *others]


def parser(documentation: str) -> argparse.ArgumentParser:
    """Return a parser with the common options; unknown options are Megatron's flags."""
    made = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", choices=MODELS, default="llama-7b")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("-o", "--output", metavar="FILE", help="append the tables as markdown")
    return made


def refuse(why: str) -> NoReturn:
    sys.exit(f"{Path(sys.argv[0]).stem}: {why}")


def begin(arguments: argparse.Namespace, layers: int, context: int, others: Sequence[str]) -> Any:
    """Start Megatron on the device in ``arguments``; return the setup for building stages."""
    if arguments.device == "cpu":  # before torch looks for GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        refuse("--device cuda: this host has no CUDA GPU; --device cpu tries the script")
    sys.path.insert(0, str(ROOT))
    from megatron_epp.mcore.patching import cpu_host, cuda_host

    if on_gpu:
        cuda_host.prepare(["--epp"])  # as training has it: hardware queues, modules, allocator
    cpu_host.install_cpu_host()
    import single_stage

    return single_stage.start_single_process(
        flags(arguments.model, layers, context, on_gpu, others)
    )


def hardware() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"A CPU with {len(os.sched_getaffinity(0))} cores: a trial of the script, no result"
    properties = torch.cuda.get_device_properties(0)
    engine = "without Transformer Engine"
    try:
        import transformer_engine

        engine = f"Transformer Engine {transformer_engine.__version__}"
    except (ImportError, OSError):
        pass
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, torch {torch.__version__}, "
        f"{engine}"
    )
