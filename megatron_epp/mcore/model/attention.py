"""The attention that this rank computes with: which kernels, asked for by flag and tried first."""

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from megatron.core.models.common.embeddings import _yarn_get_mscale
from torch import Tensor

from megatron_epp.layers.attention.cpu import PartsAttention
from megatron_epp.layers.attention.flash import MOST_HEAD_SIZE, FlashKernel
from megatron_epp.layers.attention.padded import PaddedKernel
from megatron_epp.layers.attention.selftest import require_right
from megatron_epp.layers.attention.te import TransformerEngineKernel
from megatron_epp.layers.attention.varlen import Kernel, VarlenAttention
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.recompute.outputs import RecomputeHandle
from megatron_epp.mcore.patching import cpu_host, engine_on_cpu

logger = logging.getLogger(__name__)

AUTO_BACKEND, TE, TORCH = "auto", "te", "torch"
_UNFUSED = "NVTE_UNFUSED_ATTN"  # read by Transformer Engine whenever it chooses anew
SIZES = 8  # what sizes of heads are multiples of, in kernels of GPUs


class Attention(Protocol):
    """Attention of one layer of a chunk. q [T, H, D], k and v [T, G, D] of all its rows; gives the
    output [T, H, D] and, with ``drop``, the handle that recomputes it. ``stores_last_slice``: the K
    and V of a document's last slice lie in the store, too. ``latents``: layers with latent
    attention keep latents in the place of K and V. ``whole``: the same over all heads of the
    tensor-parallel rank, for documents that one context-parallel rank computes alone."""

    name: str
    stores_last_slice: bool
    latents: bool

    @property
    def whole(self) -> "Attention": ...

    def __call__(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, state: ChunkState, layer: int, drop: bool
    ) -> tuple[Tensor, RecomputeHandle | None]: ...

    def of_layer(self, before: int | None, sinks: Callable[[], Tensor | None]) -> "Attention":
        """The attention of a layer with a window (queries see ``before`` inputs in front of them)
        or with sinks (logits of its heads, [H]). ValueError: its kernels know neither."""
        ...


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one call of a kernel: ``query`` heads in ``key`` groups, of ``size`` each; those of
    values may have another, ``value``."""

    query: int
    key: int
    size: int
    scale: float
    dtype: torch.dtype
    value: int = 0  # 0: as ``size``

    def __post_init__(self):
        if not self.value:
            object.__setattr__(self, "value", self.size)

    @classmethod
    def of(cls, config: Any, context: int | None = None) -> "Heads":
        """Heads of a rank, sharded over tensor- and context-parallel ranks; ``context``: these, if
        other than the configuration's."""
        tensor = config.tensor_model_parallel_size
        context = config.context_parallel_size if context is None else context
        heads = config.num_attention_heads // tensor // context
        if getattr(config, "multi_latent_attention", False):
            size = config.qk_head_dim + config.qk_pos_emb_head_dim
            scale = _latent_scale(config, size)
            return cls(heads, heads, size, scale, config.params_dtype, config.v_head_dim)
        key = max(1, config.num_query_groups // tensor)
        scale = config.softmax_scale
        return cls(
            heads,
            max(1, key // context),
            config.kv_channels,
            1 / math.sqrt(config.kv_channels) if scale is None else scale,
            config.params_dtype,
        )


def _latent_scale(config: Any, size: int) -> float:
    """Softmax scale of latent attention with heads of ``size``; YaRN's stretch of the context is in
    it, whichever rotary embedding the layer has (MultiLatentAttention.__init__)."""
    stretch = _yarn_get_mscale(config.rotary_scaling_factor, config.mscale_all_dim)
    return stretch * stretch / math.sqrt(size)


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
    heads, whole = Heads.of(config), Heads.of(config, 1)
    by_gpu_kernels = device.type == "cuda" or cpu_host.has_gpu_kernels()
    if by_gpu_kernels and (config.window_size or config.softmax_type != "vanilla"):
        raise ValueError(
            "--window-size and --softmax-type: --epp attends with windows and sinks on hosts "
            "without a GPU only; leave them out, or train without --epp"
        )
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
