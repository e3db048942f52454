"""Quantisation in blocks: fp8 (1 x 128, 128 x 128) and MXFP8 (1 x 32), by rows and columns.

The scale of a block is the smallest power of two with which the block's largest element fits the
format. Column-wise data are for products that reduce over rows. Column-wise fp8 data are
transposed; column-wise MXFP8 data are not.

    x [T, K]            data        scales, padded
    FP8, 1 x 128        [T, K]      [K / 128, T]         by columns   [K, T]   [T / 128, K]
    FP8, 128 x 128      [T, K]      [T / 128, K / 128]   by columns   [K, T]   [K / 128, T / 128]
    MXFP8, 1 x 32       [T, K]      [T, K / 32]          by columns   [T, K]   [T / 32, K]

MXFP8 scales have the layout above or, on request, the layout of cuBLAS's products on Blackwell
("swizzled" block scales): tiles of 128 rows and 4 scales along the reduced dimension. For formats
with one scale per tensor, see per_tensor.py.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.engine.fp8.per_tensor import (
    has_one_scale,
    has_scale,
    per_tensor_operand,
    quantize_per_tensor,
)
from tests.engine.operands import dense, expect, torch_dtype

BLOCK, MX_BLOCK = 128, 32
MX_BIAS = 127  # bias of the exponent that encodes an MXFP8 scale
LEAST, MOST = -127, 127  # exponents of scales


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of data and scales in one direction.

    Attributes:
        rows: rows of a block.
        columns: columns of a block.
        data_across: whether data are transposed.
        scales_across: whether scales are transposed.
        exponents: whether scales are stored as exponents.
        swizzled: whether scales have cuBLAS's layout of tiles.
    """

    rows: int
    columns: int
    data_across: bool
    scales_across: bool
    exponents: bool = False
    swizzled: bool = False


def _layout(of: Any, columnwise: bool) -> _Layout:
    """Return the layout of quantised tensor ``of``, or of tensors that quantizer ``of`` makes."""
    two_dimensional = getattr(of, "_is_2D_scaled", None)
    if type(of).__name__ == "Float8BlockQuantizer":
        two_dimensional = of.block_scaling_dim == 2
        expect(of.force_pow_2_scales, "quantize", "scales that are no powers of two")
        expect(not of.amax_epsilon, "quantize", "a least amax is not written")
    if two_dimensional is not None:
        if two_dimensional:
            return _Layout(BLOCK, BLOCK, columnwise, columnwise)
        rows, columns = (BLOCK, 1) if columnwise else (1, BLOCK)
        return _Layout(rows, columns, columnwise, not columnwise)
    swizzled = getattr(of, "_with_gemm_swizzled_scales", getattr(of, "optimize_for_gemm", None))
    if type(of).__name__.startswith("MXFP8"):
        expect(not getattr(of, "with_2d_quantization", False), "quantize", "MXFP8 in squares")
        rows, columns = (MX_BLOCK, 1) if columnwise else (1, MX_BLOCK)
        return _Layout(rows, columns, False, False, True, bool(swizzled))
    raise NotImplementedError(f"tests.engine: a {type(of).__name__} is not written")


def is_quantised(tensor: Any) -> bool:
    """Return whether ``tensor`` is a quantised tensor of Transformer Engine."""
    return hasattr(tensor, "_fp8_dtype")


def power(exponents: Tensor) -> Tensor:
    """Return 2 to the power of ``exponents``, exactly, as float64."""
    return ((exponents + 1023) << 52).view(torch.float64)


def tiled(x_TK: Tensor, rows: int, columns: int) -> Tensor:
    """Return |x| padded with zeros, as [blocks down, rows, blocks across, columns]."""
    missing = -x_TK.shape[1] % columns, -x_TK.shape[0] % rows
    tiles = pad(x_TK, (0, missing[0], 0, missing[1])).abs()
    return tiles.view(tiles.shape[0] // rows, rows, tiles.shape[1] // columns, columns)


def exponents_of(amax: Tensor, largest: float) -> Tensor:
    """Return the exponents of the smallest scales that keep ``amax`` within ``largest``."""
    _, exponent = torch.frexp(largest / amax.clamp(min=2.0**LEAST))
    return (1 - exponent.long()).clamp(LEAST, MOST)


def expand_blocks(blocks: Tensor, shape: Sequence[int], rows: int, columns: int) -> Tensor:
    """Return ``blocks`` expanded to ``shape`` [T, K]: each element gets the value of its block."""
    wide = blocks.repeat_interleave(rows, 0)[: shape[0]]
    return wide.repeat_interleave(columns, 1)[:, : shape[1]]


def create_empty_quantized_tensor(
    quantizer: Any, shape: Any, dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    """Return an uninitialised tensor in the format of ``quantizer``."""
    spec: Any = importlib.import_module("transformer_engine.pytorch.dynamo.tensor_spec")
    specification = spec.TensorSpec(tuple(shape), dtype, quantizer, device=torch.device("cpu"))
    return specification.create_tensor()


def quantize(tensor: Any, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """Return ``tensor`` quantised by rows, by columns or both, as ``quantizer`` requests.

    If ``output`` is not None, it receives the result. ``noop`` must be None.
    """
    kernel = "quantize"
    expect(noop is None, kernel, "a flag that says whether to run is not written")
    x = dense(kernel, "the tensor", tensor)
    per_tensor = has_one_scale(quantizer) or has_scale(quantizer)
    if not per_tensor:
        _layout(quantizer, False)  # raises for one that is not implemented
    if output is None:
        output = create_empty_quantized_tensor(quantizer, x.shape, x.dtype, None, False)
    if per_tensor:
        return quantize_per_tensor(kernel, x, quantizer, output)
    x_TK, dtype = x.double().reshape(-1, x.shape[-1]), torch_dtype(quantizer.dtype)
    for columnwise in (False, True):
        data, scales = _parts(output, columnwise)
        if data is None:
            continue
        layout = _layout(quantizer, columnwise)
        values, exponents = _scaled(kernel, x_TK, layout, dtype)
        stored = values.T if layout.data_across else values
        data.copy_(stored.contiguous().view(torch.uint8).view(data.shape))
        blocks = exponents.T if layout.scales_across else exponents
        encoded = (blocks + MX_BIAS) if layout.exponents else power(blocks)
        placed = torch.zeros_like(scales)
        placed[: blocks.shape[0], : blocks.shape[1]] = encoded.to(scales.dtype)
        scales.copy_(_swizzled(placed, columnwise) if layout.swizzled else placed)
    return output


def split_quantize(
    tensor: Tensor, split_sections: Sequence[int], quantizers: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:  # fmt: skip
    """Quantise consecutive groups of rows, with one quantizer per group."""
    kernel = "split_quantize"
    expect(sum(split_sections) == len(tensor), kernel, f"{len(tensor)} rows: {split_sections}")
    parts = tensor.split(list(split_sections))
    return [quantize(part, one) for part, one in zip(parts, quantizers, strict=True)]


def _swizzled(scales: Tensor, columnwise: bool) -> Tensor:
    """Return scales in cuBLAS's layout.

    The layout has tiles of 128 x 4 scales. A tile contains rows 0, 32, 64, 96, then rows 1, 33, 65,
    97, and so on. ``columnwise`` says whether the scales belong to column-wise data.
    """
    flat = scales.T if columnwise else scales
    rows, columns = flat.shape
    tiles = flat.reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(scales.shape)


def _unswizzled(scales: Tensor, columnwise: bool) -> Tensor:
    """Return scales in row-major layout: the inverse of :func:`_swizzled`."""
    rows, columns = scales.shape[::-1] if columnwise else scales.shape
    tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    flat = tiles.reshape(rows, columns)
    return flat.T if columnwise else flat


def _parts(tensor: Any, columnwise: bool) -> tuple[Any, Any]:
    name = "columnwise" if columnwise else "rowwise"
    return getattr(tensor, f"_{name}_data"), getattr(tensor, f"_{name}_scale_inv")


def _scaled(
    kernel: str, x_TK: Tensor, layout: _Layout, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return x divided by its blocks' scales, in ``dtype``, and the exponents of the scales."""
    (rows, columns), largest = x_TK.shape, torch.finfo(dtype).max
    divisible = not (layout.exponents and (rows % MX_BLOCK or columns % MX_BLOCK))
    expect(divisible, kernel, f"({rows}, {columns}) in MXFP8, expected multiples of {MX_BLOCK}")
    exponents = exponents_of(tiled(x_TK, layout.rows, layout.columns).amax((1, 3)), largest)
    values = x_TK * power(-expand_blocks(exponents, x_TK.shape, layout.rows, layout.columns))
    return values.clamp(-largest, largest).float().to(dtype), exponents


def operand(kernel: str, name: str, tensor: Any, columnwise: bool) -> Tensor:
    """Return the values [T, K] that a product reads from row-wise or column-wise data."""
    if has_one_scale(tensor):
        return per_tensor_operand(kernel, name, tensor, columnwise)
    data, scales = _parts(tensor, columnwise)
    way = "columns" if columnwise else "rows"
    expect(data is not None, kernel, f"{name} is read by {way}, and has no such data")
    layout = _layout(tensor, columnwise)
    dtype = torch_dtype(tensor._fp8_dtype)
    if layout.data_across:
        values = data.reshape(data.shape[0], -1).view(dtype).double().T
    else:
        values = data.reshape(-1, data.shape[-1]).view(dtype).double()
    rows, columns = values.shape
    if layout.swizzled:
        scales = _unswizzled(scales, columnwise)
    blocks = scales.T if layout.scales_across else scales
    blocks = blocks[: -(-rows // layout.rows), : -(-columns // layout.columns)]
    powers = power(blocks.long() - MX_BIAS) if layout.exponents else blocks.double()
    return values * expand_blocks(powers, values.shape, layout.rows, layout.columns)


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    """Return the values of a quantised tensor in ``dtype``."""
    by_rows = has_one_scale(tensor) or _parts(tensor, False)[0] is not None
    values = operand("dequantize", "the tensor", tensor, not by_rows)
    return values.to(torch_dtype(dtype)).view(tensor.size())


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """Return the fp8 bytes [..., K] transposed to [K, ...]."""
    turned = data.reshape(-1, data.shape[-1]).T.contiguous().view(data.shape[-1], *data.shape[:-1])
    return turned if out is None else out.copy_(turned)


def swap_first_dims(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the tensor with its first two dimensions swapped."""
    turned = tensor.transpose(0, 1).contiguous()
    return turned if out is None else out.copy_(turned)
