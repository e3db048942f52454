"""Patches of flash-linear-attention's kernels for chunks of many sizes.

flash-linear-attention expects one size per run. It autotunes the convolution again for every 1,024
more rows, with 16 configurations each, although neither kernel reads that number. It computes the
table of chunk indices with a device synchronisation. Unpatched, both would happen during
iterations, on one stage after the other.
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

# Modules with the convolution's kernels by release, and their argument that counts 1,024 rows.
_CONVOLUTIONS = ("fla.modules.conv.triton.kernels", "fla.modules.convolution")
_KERNELS, _SIZE = ("causal_conv1d_fwd_kernel", "causal_conv1d_bwd_kernel"), "NB"
_INDEX, _TABLE = "fla.ops.utils.index", "prepare_chunk_indices"
_BLOCKS = "epp_blocks"  # attribute of a tensor of boundaries: its tables, by rows of a block


@cache
def suit_many_sizes() -> None:
    """Patch flash-linear-attention for chunks of varying sizes, once per process.

    The convolution kernels then autotune once, instead of once per 1,024 rows. The table of chunk
    indices is computed on the CPU, without synchronising with the device. Releases of
    flash-linear-attention without these functions are not patched.
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
    """Patch ``kernel.run`` to pass NB = 1, so that one autotuning serves all sizes.

    NB counts 1,024 rows and is part of the autotuner's key. A kernel whose body reads NB is not
    patched.
    """
    body: Any = kernel
    while not inspect.isfunction(body):
        body = getattr(body, "fn", None)
        if body is None:
            return
    source = inspect.getsource(body)
    source = source[source.index("def ") :]  # its decorators name it, too
    if len(re.findall(rf"\b{_SIZE}\b", source)) != 1:  # only its parameter
        return
    launch: Callable[..., Any] = kernel.run

    @wraps(launch)
    def run(*inputs: Any, **named: Any) -> Any:
        return launch(*inputs, **(named | {_SIZE: 1}))

    kernel.run = run


def _blocks_on_host(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a replacement of ``original`` that uses the lengths which a chunk's boundaries carry.

    The table is made once for all layers of a chunk.
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

    The table is int64 [blocks, 2] on the CPU. Each row has the index of the sequence, and the index
    of the block in the sequence. No block spans two sequences.
    """
    counts = [-(-length // rows) for length in lengths]
    sequences = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    firsts = torch.tensor([0, *accumulate(counts)])[sequences]
    return torch.stack((sequences, torch.arange(len(sequences)) - firsts), 1)
