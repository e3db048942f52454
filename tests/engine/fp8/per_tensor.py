"""FP8 with one scale per tensor: the format's maximum divided by the tensor's maximum magnitude.

    x [T, K]    data [T, K]    transpose [K, T], for GPUs that read only rows    1 / scale [1]

A quantizer with current scaling computes the tensor's maximum, over a group of ranks if requested.
A ``Float8Quantizer``, which casts parts of weights, uses its given scale. A transpose that is
marked as stale is not read.
"""

from typing import Any

import torch
from torch import Tensor

from tests.engine.operands import expect, torch_dtype


def has_one_scale(of: Any) -> bool:
    """Return whether ``of`` is a tensor with one scale, or a quantizer with current scaling."""
    return hasattr(of, "_transpose_invalid") or _named(of, "Float8CurrentScalingQuantizer")


def has_scale(quantizer: Any) -> bool:
    """Return whether ``quantizer`` has a given scale for the tensor, and does not compute one."""
    return _named(quantizer, "Float8Quantizer")


def _named(of: Any, name: str) -> bool:
    return type(of).__name__ == name


def scale_of(amax: Tensor, largest: float, power_of_two: bool, epsilon: float = 0.0) -> Tensor:
    """Return ``largest`` / max(``amax``, ``epsilon``) in float32; 1 for divisors 0, inf and NaN."""
    largest_value = amax.float().clamp(min=epsilon)
    none = (largest_value == 0) | ~largest_value.isfinite()
    scale = (largest / largest_value.masked_fill(none, largest)).clamp(
        max=torch.finfo(torch.float32).max
    )
    if power_of_two:
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
    return scale


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp8 bytes of ``x`` times ``scale``."""
    largest = torch.finfo(dtype).max
    return (x.double() * scale).clamp(-largest, largest).float().to(dtype).view(torch.uint8)


def quantize_per_tensor(kernel: str, x: Tensor, quantizer: Any, output: Any) -> Any:
    """Quantize ``x`` into ``output`` with one scale, and return it."""
    dtype = torch_dtype(quantizer.dtype)
    if has_scale(quantizer):
        scale = quantizer.scale
    else:
        amax = x.abs().amax() if x.numel() else x.new_zeros(())
        if quantizer.with_amax_reduction:
            amax = _largest_of(amax, quantizer.amax_reduction_group)
        largest, power = torch.finfo(dtype).max, quantizer.force_pow_2_scales
        scale = scale_of(amax, largest, power, quantizer.amax_epsilon)
    values = cast(x, scale, dtype)
    expect(output._data is not None or output._transpose is not None, kernel, "nowhere to write")
    if output._data is not None:
        output._data.copy_(values.view(output._data.shape))
    if output._transpose is not None:
        values_TK = values.view(-1, values.shape[-1])
        output._transpose.copy_(values_TK.T.reshape(output._transpose.shape))
        output._transpose_invalid = False
    output._scale_inv.copy_(1 / scale.view(output._scale_inv.shape))
    return output


def _largest_of(amax: Tensor, group: Any) -> Tensor:
    """Return the maximum of ``amax`` over the ranks of ``group``.

    Like the compiled kernel, this function bypasses the Python functions of torch.distributed.
    """
    reduced = torch.ops._c10d_functional.all_reduce(amax.view(1), "max", group.group_name)
    return torch.ops._c10d_functional.wait_tensor(reduced)[0]


def per_tensor_operand(kernel: str, name: str, tensor: Any, columnwise: bool) -> Tensor:
    """Return the values [T, K] that a product reads from row-wise or column-wise data."""
    dtype = torch_dtype(tensor._fp8_dtype)
    across = columnwise and torch.cuda.get_device_properties(0).major < 10
    data = tensor._transpose if across else tensor._data
    way = "columns" if columnwise else "rows"
    stale = across and tensor._transpose_invalid
    expect(data is not None and not stale, kernel, f"{name} is read by {way}, and has none")
    values = data.reshape(data.shape[0], -1).T if across else data.reshape(-1, data.shape[-1])
    return values.contiguous().view(dtype).double() * tensor._scale_inv.double()
