"""Patches of flash-linear-attention's kernels for chunks of many sizes.

flash-linear-attention assumes that all calls of a run have one size. It autotunes the convolution
kernels, with 16 configurations each, for every new number of blocks of 1,024 rows, although the
kernels do not read this number. It also waits for the device to compute a table of the blocks of
all sequences. Without patches, autotuning and waiting delay iterations on one stage after another.
"""

import inspect
import re
import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.layers.ssm.carried import HOST_LENGTHS

# Modules with the convolution kernels in different releases, and their argument that counts blocks
# of 1,024 rows.
_CONVOLUTIONS = ("fla.modules.conv.triton.kernels", "fla.modules.convolution")
_KERNELS, _SIZE = ("causal_conv1d_fwd_kernel", "causal_conv1d_bwd_kernel"), "NB"
_INDEX, _TABLE = "fla.ops.utils.index", "prepare_chunk_indices"
_BLOCKS = "epp_blocks"  # attribute of a boundaries tensor: its block tables, by rows per block


@cache
def suit_many_sizes() -> None:
    """Patch flash-linear-attention for chunks of varying sizes, once per process.

    The convolution kernels then autotune once, instead of once for each number of blocks of 1,024
    rows. The table of blocks is computed on the CPU, without synchronising with the device.
    Releases of flash-linear-attention without these functions are not patched.
    """
    for name in _CONVOLUTIONS:
        module = _module(name)
        for kernel in filter(None, (getattr(module, kernel, None) for kernel in _KERNELS)):
            tune_once(kernel)
    index = _module(_INDEX)
    if (original := getattr(index, _TABLE, None)) is not None:
        replacement = _blocks_on_host(original)
        for module in [one for key, one in sys.modules.items() if key.split(".")[0] == "fla"]:
            if getattr(module, _TABLE, None) is original:
                setattr(module, _TABLE, replacement)


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


def tune_once(kernel: Any) -> None:
    """Patch ``kernel.run`` to pass NB = 1, so that the kernel is autotuned only once.

    NB is the number of blocks of 1,024 rows and is part of the autotuner's key. A kernel whose body
    reads NB is not patched.
    """
    body: Any = kernel
    while not inspect.isfunction(body):
        body = getattr(body, "fn", None)
        if body is None:
            return
    source = inspect.getsource(body)
    source = source[source.index("def ") :]  # without decorators, which also contain NB
    if len(re.findall(rf"\b{_SIZE}\b", source)) != 1:  # only its parameter
        return
    launch: Callable[..., Any] = kernel.run

    @wraps(launch)
    def run(*inputs: Any, **named: Any) -> Any:
        return launch(*inputs, **(named | {_SIZE: 1}))

    kernel.run = run


def _blocks_on_host(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a replacement of ``original`` that computes the table of blocks on the host.

    The replacement reads the sequences' lengths from an attribute of ``cu_seqlens``, and computes
    the table once for all layers of a chunk.
    """

    @wraps(original)
    def prepare(cu_seqlens: Tensor, chunk_size: int, *others: Any, **named: Any) -> Tensor:
        lengths = getattr(cu_seqlens, HOST_LENGTHS, None)
        if lengths is None:
            return original(cu_seqlens, chunk_size, *others, **named)
        tables: dict[int, Tensor] = vars(cu_seqlens).setdefault(_BLOCKS, {})
        if chunk_size not in tables:
            table = block_table(lengths, chunk_size).to(cu_seqlens.dtype)
            tables[chunk_size] = on_device(table, cu_seqlens.device)
        return tables[chunk_size]

    return prepare


def block_table(lengths: tuple[int, ...], rows: int) -> Tensor:
    """Return the table of all blocks of up to ``rows`` rows of sequences with these ``lengths``.

    The table is int64 [blocks, 2] on the CPU. Each row contains the index of a sequence, and the
    index of a block in this sequence. No block spans two sequences.
    """
    counts = [-(-length // rows) for length in lengths]
    sequences = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    firsts = torch.tensor([0, *accumulate(counts)])[sequences]
    return torch.stack((sequences, torch.arange(len(sequences)) - firsts), 1)
