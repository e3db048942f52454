"""Activations, their backwards, and backwards that also return the gradient of a bias.

In gated activations, the first half of the channels is the gate.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.engine.operands import dense, expect, no_quantizer, wide

Function = Callable[..., Tensor]


def derivative(function: Function, at: Tensor) -> Tensor:
    """Return the element-wise derivative of ``function`` at ``at``.

    For torch's GELU, the derivative is that of the tanh approximation.
    """
    if function is functional.gelu:
        function = _gelu
    with torch.enable_grad():
        at = at.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(at).sum(), at)
    return gradient


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _squared(x: Tensor) -> Tensor:
    return functional.relu(x).square()


def _quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gated(function: Function, x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return function(gate) * value


def _clamped(
    x: Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0
) -> Tensor:
    gate, value = x.chunk(2, -1)
    gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (value + glu_linear_offset)


_UNGATED: dict[str, Function] = {
    "gelu": _gelu,
    "qgelu": _quick,
    "relu": functional.relu,
    "srelu": _squared,
    "silu": functional.silu,
}
_GATED: dict[str, Function] = {
    "glu": partial(_gated, torch.sigmoid),
    "geglu": partial(_gated, _gelu),
    "qgeglu": partial(_gated, _quick),
    "reglu": partial(_gated, functional.relu),
    "sreglu": partial(_gated, _squared),
    "swiglu": partial(_gated, functional.silu),
    "clamped_swiglu": _clamped,
}


def _forward(name: str, function: Function) -> Function:
    def run(tensor: Tensor, quantizer: Any, **options: Any) -> Tensor:
        no_quantizer(name, quantizer)
        return function(wide(dense(name, "the input", tensor)), **options).to(tensor.dtype)

    return run


def _backward(name: str, function: Function) -> Function:
    def run(grad: Tensor, fwd_input: Tensor, quantizer: Any, **options: Any) -> Tensor:
        no_quantizer(name, quantizer)
        gradient = wide(dense(name, "the gradient", grad))
        at = wide(dense(name, "the input", fwd_input))
        with torch.enable_grad():
            at.requires_grad_()
            out = function(at, **options)
            fits = out.numel() == gradient.numel()
            expect(fits, name, f"a gradient of {tuple(grad.shape)} for {tuple(out.shape)}")
            (result,) = torch.autograd.grad(out, at, gradient.view(out.shape))
        return result.to(fwd_input.dtype)

    return run


def _with_bias(name: str, backward: Function) -> Callable[..., list[Tensor]]:
    def run(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Tensor]:
        result = backward(grad, fwd_input, quantizer)
        return [wide(result).view(-1, result.shape[-1]).sum(0).to(result.dtype), result]

    return run


def functions() -> dict[str, Callable[..., Any]]:
    """Return the functions by their names in the compiled module."""
    table: dict[str, Callable[..., Any]] = {}
    for name, function in (_UNGATED | _GATED).items():
        before = "clamped_dswiglu" if name == "clamped_swiglu" else f"d{name}"
        table[name] = _forward(name, function)
        table[before] = _backward(before, function)
        if name in _UNGATED:
            table[f"dbias_{before}"] = _with_bias(f"dbias_{before}", table[before])
    return table
