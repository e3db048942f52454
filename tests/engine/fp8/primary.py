"""Primary weights in fp8: each rank casts its part of the main weights.

A rank of a distributed optimizer has a range of a weight's elements in row-major order. Each rank
computes the maximum magnitudes in its range, the ranks reduce them to common scales, and each rank
casts its range.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.engine.fp8.per_tensor import cast, scale_of
from tests.engine.fp8.quantizers import MX_BIAS, MX_BLOCK, expand_blocks, exponents_of, power, tiled
from tests.engine.operands import dense, expect, torch_dtype, wide

Lists = Sequence[Sequence[Tensor]]


def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    """Write the largest magnitude of ``tensor`` into ``amax``."""
    amax.copy_(wide(dense("compute_amax", "the tensor", tensor)).abs().amax())


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int, noop_flag: Tensor, lists: Lists, max_fp8: float, force_pow_2_scales: bool,
    amax_epsilon: float,
) -> None:  # fmt: skip
    """Compute scales and inverses; ``lists`` are largest magnitudes, scales and inverse scales."""
    for amax, scale, scale_inv in zip(*lists, strict=True):
        scale.copy_(scale_of(amax, max_fp8, force_pow_2_scales, amax_epsilon))
        scale_inv.copy_(1 / scale)


def multi_tensor_compute_scale_inv_e8m0(chunk_size: int, noop_flag: Any, lists: Lists) -> None:
    """Compute MXFP8 scale exponents; ``lists`` are largest magnitudes and exponents, by blocks."""
    for amax, scale_inv in zip(*lists, strict=True):
        exponents = exponents_of(wide(amax), torch.finfo(torch.float8_e4m3fn).max)
        scale_inv.copy_((exponents + MX_BIAS).view(scale_inv.shape))


def _placed(kernel: str, part: Tensor, rows: int, columns: int, start: int) -> Tensor:
    """Return a tensor [rows, columns]: ``part`` from flat index ``start`` on, zeros elsewhere."""
    values = wide(dense(kernel, "the part", part)).double().flatten()
    fits = start >= 0 and start + len(values) <= rows * columns
    expect(fits, kernel, f"{len(values)} numbers from {start} on, of {rows} x {columns}")
    flat = values.new_zeros(rows * columns)
    flat[start : start + len(values)] = values
    return flat.view(rows, columns)


def _write_largest(x_TK: Tensor, amax: Tensor, rows: int, columns: int) -> None:
    largest = tiled(x_TK, rows, columns).amax((1, 3))
    amax.zero_()
    amax[: largest.shape[0], : largest.shape[1]] = largest.to(amax.dtype)


def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Write the largest magnitudes of a part's blocks into ``amax``."""
    kernel = "fp8_block_scaling_compute_partial_amax"
    x_TK = _placed(kernel, tensor, h, w, start_offset)
    _write_largest(x_TK, amax, block_len, block_len)


def fp8_block_scaling_partial_cast(
    inp: Tensor, out: Tensor, scale: Tensor, h: int, w: int, start_offset: int, block_len: int,
    out_dtype: Any,
) -> None:  # fmt: skip
    """Cast a part of a weight to fp8 with the scales of its blocks."""
    x_TK = _placed("fp8_block_scaling_partial_cast", inp, h, w, start_offset)
    scales = expand_blocks(scale.double(), x_TK.shape, block_len, block_len)
    _write(out, cast(x_TK, scales, torch_dtype(out_dtype)), start_offset)


def _write(out: Tensor, values: Tensor, start: int) -> None:
    out.copy_(values.flatten()[start : start + out.numel()])


def mxfp8_scaling_compute_partial_amax(
    tensor: Tensor, amax_rowwise: Tensor, amax_colwise: Tensor, h: int, w: int, start_offset: int
) -> None:
    """Write the largest magnitudes of a part's MXFP8 blocks, by rows and by columns."""
    kernel = "mxfp8_scaling_compute_partial_amax"
    x_TK = _placed(kernel, tensor, h, w, start_offset)
    _write_largest(x_TK, amax_rowwise, 1, MX_BLOCK)
    _write_largest(x_TK, amax_colwise, MX_BLOCK, 1)


def mxfp8_scaling_partial_cast(
    inp: Tensor, out_rowwise: Tensor, out_colwise: Tensor, scale_inv_rowwise: Tensor,
    scale_inv_colwise: Tensor, h: int, w: int, start_offset: int,
) -> None:  # fmt: skip
    """Cast a part of a weight to MXFP8, by rows and by columns."""
    x_TK = _placed("mxfp8_scaling_partial_cast", inp, h, w, start_offset)
    ways = (
        (out_rowwise, scale_inv_rowwise, 1, MX_BLOCK),
        (out_colwise, scale_inv_colwise, MX_BLOCK, 1),
    )
    for out, scale_inv, rows, columns in ways:
        blocks = power(MX_BIAS - scale_inv.long())[: -(-h // rows), : -(-w // columns)]
        values = cast(x_TK, expand_blocks(blocks, x_TK.shape, rows, columns), torch.float8_e4m3fn)
        _write(out, values, start_offset)
