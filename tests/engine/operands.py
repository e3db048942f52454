"""Checks of operands that compiled kernels do not make: type, strides, sizes and dtype."""

from typing import Any

import torch
from torch import Tensor

from tests.engine.enums import TORCH, DType

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32, torch.float64)


class Misread(RuntimeError):
    """Error of an operand that the compiled kernel would refuse or misread."""


def expect(true: bool, kernel: str, what: str) -> None:
    """Raise :class:`Misread` with the message ``what`` if the condition ``true`` is False."""
    if not true:
        raise Misread(f"{kernel}: {what}")


def dense(kernel: str, name: str, tensor: Any) -> Tensor:
    """Return ``tensor`` detached, if it is contiguous and of a supported dtype.

    Raises:
        Misread: if ``tensor`` is not contiguous or its dtype is not supported.
    """
    expect(isinstance(tensor, Tensor), kernel, f"{name} is a {type(tensor).__name__}, no tensor")
    is_tensor = type(tensor) in (Tensor, torch.nn.Parameter)
    expect(
        is_tensor, kernel, f"{name} is a {type(tensor).__name__}: quantised operands are lacking"
    )
    strides = tuple(tensor.stride())
    expect(
        tensor.is_contiguous(),
        kernel,
        f"{name} {tuple(tensor.shape)} has strides {strides}, and is read as if in one piece",
    )
    expect(tensor.dtype in FLOATS, kernel, f"{name} is of {tensor.dtype}")
    return tensor.detach()


def no_quantizer(kernel: str, quantizer: Any) -> None:
    """Raise a NotImplementedError unless ``quantizer`` is None."""
    if quantizer is not None:
        raise NotImplementedError(
            f"tests.engine: {kernel} with a {type(quantizer).__name__} is not written"
        )


def torch_dtype(wanted: Any) -> torch.dtype:
    """Return torch's dtype for a value of the module's enumeration; a torch dtype is unchanged."""
    return wanted if isinstance(wanted, torch.dtype) else TORCH[DType(int(wanted))]


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in the accumulation dtype: float32, or float64 for float64 tensors."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def written(kernel: str, out: Tensor | None, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values`` rounded once to ``dtype``; write them into ``out`` unless it is None."""
    if out is None:
        return values.to(dtype).contiguous()
    dense(kernel, "the output", out)
    expect(
        out.numel() == values.numel() and out.dtype == dtype,
        kernel,
        f"the output is {tuple(out.shape)} of {out.dtype}, expected {tuple(values.shape)} "
        f"of {dtype}",
    )
    with torch.no_grad():
        out.copy_(values.view(out.shape))
    return out
