"""Choice of this rank's attention kernels and masks, and tests of kernels on the device."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.layers.attention.cpu import PartsAttention
from megatron_epp.layers.attention.flash import MOST_HEAD_SIZE, FlashKernel
from megatron_epp.layers.attention.layer_attention import Attention, Heads
from megatron_epp.layers.attention.padded import PaddedKernel
from megatron_epp.layers.attention.selftest import TIMED_TOKENS, backward_seconds, require_right
from megatron_epp.layers.attention.te import MASK, TOP_LEFT_MASK, TransformerEngineKernel
from megatron_epp.layers.attention.varlen import Kernel, VarlenAttention
from megatron_epp.mcore.kinds.registry import heads_of, layers_see
from megatron_epp.mcore.patching import cpu_host, emulated_engine
from megatron_epp.runtime.consensus import broadcast_result

logger = logging.getLogger(__name__)

AUTO_BACKEND, TE, TORCH = "auto", "te", "torch"
_UNFUSED = "NVTE_UNFUSED_ATTN"  # Transformer Engine reads it each time it chooses a kernel
SIZES = 8  # GPU kernels support head sizes that are multiples of this
# Transformer Engine refuses inputs by assertions; old versions raise TypeErrors for new arguments.
_REFUSALS = (AssertionError, ImportError, OSError, RuntimeError, TypeError, ValueError)


def this_device() -> torch.device:
    """Return this rank's device: its current CUDA device, or the CPU without a GPU."""
    if cpu_host.has_gpu():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def attention_for(wanted: str, config: Any, device: torch.device) -> Attention:
    """Select the attention for a model, and test its kernels on the device.

    On a CPU-only host, the function returns torch's CPU kernels without a test. If a preferred
    kernel fails its test, a warning names the reason.

    Args:
        wanted: Value of --epp-attention; ``auto`` selects the first correct kernels.
        config: Megatron's configuration of the model.
        device: Device of this rank.

    Raises:
        ValueError: ``te`` is requested on a CPU-only host, the kernels do not support the model's
            dtype, or no kernels are correct on this device (the message contains each reason).
    """
    heads, all_heads = heads_of(config), heads_of(config, context=1)
    by_gpu_kernels = device.type == "cuda" or cpu_host.has_gpu_kernels()
    if not by_gpu_kernels:
        if wanted == TE:
            raise ValueError(
                "--epp-attention te: this host has no CUDA GPU; leave the flag out (torch's "
                "kernels for the CPU are taken)"
            )
        return PartsAttention(heads.scale)
    if emulated_engine.is_started() and heads.dtype == torch.float64:
        # A certificate in float64; the test is about the kernels, not about the number format.
        heads, all_heads = (replace(one, dtype=torch.bfloat16) for one in (heads, all_heads))
    if heads.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"--epp on a GPU trains in {str(heads.dtype).removeprefix('torch.')} here, which its "
            "attention kernels do not know; give --bf16 or --fp16"
        )
    reasons, seen = [], layers_see(config)
    names = (TE, TORCH) if wanted == AUTO_BACKEND else (wanted,)
    for name, sizes in ((name, sizes) for name in names for sizes in _sizes(heads)):
        shown = name if sizes == _sizes(heads)[0] else f"{name} (heads padded to {sizes[0]})"
        try:
            kernel = _right_kernel(name, heads, sizes, seen, device)
            of_all_heads = (
                kernel
                if all_heads == heads
                else _right_kernel(name, all_heads, sizes, seen, device)
            )
        except _REFUSALS as error:
            reasons.append(f"{shown}: {str(error).splitlines()[0] if str(error) else repr(error)}")
            continue
        if reasons:
            logger.warning("attention by %s kernels, as %s", shown, "; ".join(reasons))
        return VarlenAttention(kernel, of_all_heads)
    raise ValueError(
        f"--epp-attention {wanted}: no attention can be used on this device ({'; '.join(reasons)})"
    )


def _right_kernel(
    name: str,
    heads: Heads,
    sizes: tuple[int, int],
    seen: Sequence[tuple[int | None, bool]],
    device: torch.device,
) -> Kernel:
    """Return a kernel that passed its test on the device for every attention variant.

    Transformer Engine's calls without context have a mask of their own, unless it fails the test.
    """
    kernel = _kernel(name, heads, sizes)
    if (engine := _engine_in(kernel)) is not None:
        engine.use_top_left(True)
        try:
            _require_right(kernel, heads, seen, device)
            return kernel
        except _REFUSALS as error:
            engine.use_top_left(False)
            logger.warning("attention without context by mask %s: %s", MASK, error)
    _require_right(kernel, heads, seen, device)
    return kernel


def _engine_in(kernel: Kernel) -> TransformerEngineKernel | None:
    """Return Transformer Engine's kernel in ``kernel``, if it is one, padded or not."""
    inner = kernel.kernel if isinstance(kernel, PaddedKernel) else kernel
    return inner if isinstance(inner, TransformerEngineKernel) else None


def _require_right(
    kernel: Kernel, heads: Heads, seen: Sequence[tuple[int | None, bool]], device: torch.device
) -> None:
    for before, sinks in seen:
        require_right(
            kernel.of_layers(before, sinks) if before is not None or sinks else kernel,
            heads.query,
            heads.key,
            heads.size,
            heads.scale,
            heads.dtype,
            device,
            heads.value,
            before,
            sinks,
        )


def choose_mask(
    attention: Attention,
    config: Any,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Choose the faster mask for Transformer Engine's calls without cached K/V.

    All ranks of ``group`` must call this function. On a GPU, rank 0 of ``group`` times a backward
    with each mask. Emulated kernels are not timed; they keep ``TOP_LEFT_MASK``.

    Args:
        attention: The attention of the job, as :func:`attention_for` returns it.
        config: Megatron's configuration of the model.
        device: Device of this rank.
        group: CPU group of the job's ranks; None: this rank chooses for itself.

    Raises:
        ValueError: The chosen mask fails the test of these calls.
    """
    if device.type != "cuda" or not isinstance(attention, VarlenAttention):
        return
    choose = partial(_faster_mask, attention.kernel, heads_of(config), layers_see(config), device)
    chosen = choose() if group is None else broadcast_result(choose, group)
    of_all_heads = attention.all_heads.kernel, heads_of(config, context=1)
    for kernel, heads in ((attention.kernel, heads_of(config)), of_all_heads):
        engine = _engine_in(kernel)
        if chosen == MASK and engine is not None and engine.without_context is not None:
            engine.use_top_left(False)
            _require_right(kernel, heads, layers_see(config), device)


def _faster_mask(
    kernel: Kernel,
    heads: Heads,
    seen: Sequence[tuple[int | None, bool]],
    device: torch.device,
) -> str:
    """Return the mask with which a backward without context takes less time on this device."""
    engine = _engine_in(kernel)
    if engine is None or engine.without_context is None or (None, False) not in seen:
        return MASK
    if isinstance(kernel, PaddedKernel):
        heads = replace(heads, size=kernel.size, value=kernel.value)
    kernels = {MASK: engine.of_layers(None, False), TOP_LEFT_MASK: engine.without_context}
    seconds = backward_seconds([*kernels.values()], heads, device)
    times = dict(zip(kernels, seconds, strict=True))
    chosen = min(times, key=lambda mask: times[mask])
    if not dist.is_initialized() or dist.get_rank() == 0:
        shown = ", ".join(f"{1e3 * value:.3f} ms with {mask}" for mask, value in times.items())
        logger.info(
            "attention without context: mask %s, as the backward of %d tokens takes %s",
            chosen, TIMED_TOKENS, shown,
        )  # fmt: skip
    return chosen


def _sizes(heads: Heads) -> list[tuple[int, int]]:
    """Return the pairs of head sizes to try: (size of queries and keys, size of values).

    The first pair is rounded up to multiples of 8. If its sizes differ, the second pair uses the
    larger size for both.
    """
    size, value = (-(-each // SIZES) * SIZES for each in (heads.size, heads.value))
    most = max(size, value)
    return [(size, value)] if size == value else [(size, value), (most, most)]


def _kernel(name: str, heads: Heads, sizes: tuple[int, int]) -> Kernel:
    size, value = sizes
    kernel = _KERNELS[name](replace(heads, size=size, value=value))
    if (heads.size, heads.value) == sizes:
        return kernel
    return PaddedKernel(kernel, size, value)


@contextmanager
def _no_scores() -> Iterator[None]:
    """Forbid Transformer Engine's unfused attention in this context.

    Unfused attention stores all scores, which exceed the memory with long contexts. The planner
    would react with ever smaller chunks. In this context, the environment variable
    NVTE_UNFUSED_ATTN is 0. Transformer Engine then raises an error if no other attention is
    available. Only its calls run in this context: Megatron expects 1 when it builds a model.
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


def _engine(heads: Heads) -> Kernel:
    # Older versions accept only a single number, for equal sizes.
    sizes = heads.size if heads.size == heads.value else (heads.size, heads.value)
    return TransformerEngineKernel(heads.query, heads.key, sizes, heads.scale, _no_scores)


def _torch(heads: Heads) -> Kernel:
    if heads.value != heads.size:
        raise ValueError(f"heads of {heads.size}, of values {heads.value}: expected one size")
    if heads.size > MOST_HEAD_SIZE or heads.size % 8:
        raise ValueError(
            f"heads of {heads.size}: expected a multiple of 8 up to {MOST_HEAD_SIZE}"
        )  # fmt: skip
    return FlashKernel(heads.scale)


_KERNELS: dict[str, Callable[[Heads], Kernel]] = {
    TE: _engine,
    TORCH: _torch,
}
