"""The attention that this rank computes with: which kernels, asked for by flag and tried first."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from megatron_epp.layers.attention.cpu import PartsAttention
from megatron_epp.layers.attention.flash import MOST_HEAD_SIZE, FlashKernel
from megatron_epp.layers.attention.layer_attention import Attention, Heads
from megatron_epp.layers.attention.padded import PaddedKernel
from megatron_epp.layers.attention.selftest import require_right
from megatron_epp.layers.attention.te import TransformerEngineKernel
from megatron_epp.layers.attention.varlen import Kernel, VarlenAttention
from megatron_epp.mcore.model.kinds.registry import beyond_gpu_kernels, heads_of
from megatron_epp.mcore.patching import cpu_host, engine_on_cpu

logger = logging.getLogger(__name__)

AUTO_BACKEND, TE, TORCH = "auto", "te", "torch"
_UNFUSED = "NVTE_UNFUSED_ATTN"  # read by Transformer Engine whenever it chooses anew
SIZES = 8  # what sizes of heads are multiples of, in kernels of GPUs


def this_device() -> torch.device:
    """Device that this rank computes on."""
    if cpu_host.has_gpu():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def attention_for(wanted: str, config: Any, device: torch.device) -> Attention:
    """Attention that ``--epp-attention wanted`` names, for a model of Megatron's ``config``.

    On a GPU the kernels are tried on the device first; ``auto`` takes the first that computes
    rightly. ValueError: one line on why none does.
    """
    heads, whole = heads_of(config), heads_of(config, context=1)
    by_gpu_kernels = device.type == "cuda" or cpu_host.has_gpu_kernels()
    if by_gpu_kernels and (reason := beyond_gpu_kernels(config)) is not None:
        raise ValueError(reason)
    if not by_gpu_kernels:
        if wanted == TE:
            raise ValueError(
                "--epp-attention te: this host has no CUDA GPU; leave the flag out (torch's "
                "kernels for the CPU are taken)"
            )
        return PartsAttention(heads.scale)
    if engine_on_cpu.is_started() and heads.dtype == torch.float64:
        # Of a certificate: what is tried below are the kernels, not their number format.
        heads, whole = (replace(one, dtype=torch.bfloat16) for one in (heads, whole))
    if heads.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"--epp on a GPU trains in {str(heads.dtype).removeprefix('torch.')} here, which its "
            "attention kernels do not know; give --bf16 or --fp16"
        )
    reasons = []
    for name in (TE, TORCH) if wanted == AUTO_BACKEND else (wanted,):
        try:
            kernel = _right_kernel(name, heads, device)
            of_whole = kernel if whole == heads else _right_kernel(name, whole, device)
        except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
            # Transformer Engine refuses by assertions in a dozen places.
            reasons.append(f"{name}: {str(error).splitlines()[0] if str(error) else repr(error)}")
            continue
        if reasons:
            logger.warning("attention by %s kernels, as %s", name, "; ".join(reasons))
        return VarlenAttention(kernel, of_whole)
    raise ValueError(
        f"--epp-attention {wanted}: no attention can be used on this device ({'; '.join(reasons)})"
    )


def _right_kernel(name: str, heads: Heads, device: torch.device) -> Kernel:
    """A kernel that has been tried on the device."""
    kernel = _kernel(name, heads)
    require_right(
        kernel,
        heads.query,
        heads.key,
        heads.size,
        heads.scale,
        heads.dtype,
        device,
        heads.value,
    )
    return kernel


def _kernel(name: str, heads: Heads) -> Kernel:
    """Kernels that know one size of heads get the larger one, a multiple of 8."""
    size = -(-max(heads.size, heads.value) // SIZES) * SIZES
    if heads.size == heads.value == size:
        return _KERNELS[name](heads)
    return PaddedKernel(_KERNELS[name](replace(heads, size=size, value=0)), size)


@contextmanager
def _no_scores() -> Iterator[None]:
    """Transformer Engine may not choose the attention that holds all scores: for a long context no
    memory does, and the executor would plan ever smaller chunks. It says then that no attention is
    left. Around its calls alone, as Megatron wants 1 where it builds a model.
    """
    before = os.environ.get(_UNFUSED)
    os.environ[_UNFUSED] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_UNFUSED]
        else:
            os.environ[_UNFUSED] = before


def _torch(heads: Heads) -> Kernel:
    if heads.size > MOST_HEAD_SIZE or heads.size % 8:
        raise ValueError(
            f"heads of {heads.size}: expected a multiple of 8 up to {MOST_HEAD_SIZE}"
        )  # fmt: skip
    return FlashKernel(heads.scale)


_KERNELS: dict[str, Callable[[Heads], Kernel]] = {
    TE: lambda of: TransformerEngineKernel(of.query, of.key, of.size, of.scale, _no_scores),
    TORCH: _torch,
}
