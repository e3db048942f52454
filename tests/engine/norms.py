"""LayerNorm and RMSNorm, forward and backward, with float32 statistics per row.

Shapes: T rows, H channels. The weight is w, or 1 + w if it is zero-centred.
"""

from typing import Any

from torch import Tensor

from tests.engine.fp8.quantizers import quantize
from tests.engine.operands import dense, expect, torch_dtype, wide, written


def _operands(kernel: str, x_TH: Any, weight_H: Any, centred: bool) -> tuple[Tensor, Tensor]:
    x, weight = dense(kernel, "the input", x_TH), dense(kernel, "the weight", weight_H)
    expect(x.dim() == 2, kernel, f"an input of {tuple(x.shape)}, expected rows of channels")
    expect(
        weight.shape == x.shape[1:],
        kernel,
        f"a weight of {tuple(weight.shape)} for {tuple(x.shape)}",
    )
    expect(weight.dtype == x.dtype, kernel, f"a weight of {weight.dtype} for {x.dtype}")
    return wide(x), wide(weight) + (1 if centred else 0)


def _output(kernel: str, out: Any, values: Tensor, otype: Any, quantizer: Any) -> Any:
    if quantizer is None:
        return written(kernel, out, values, torch_dtype(otype))
    return quantize(written(kernel, None, values, torch_dtype(otype)), quantizer, out)


def rmsnorm_fwd(
    input: Any, weight: Any, eps: float, ln_out: Any, quantizer: Any, otype: Any,
    sm_margin: int, zero_centered_gamma: bool,
) -> list[Tensor | None]:  # fmt: skip
    """Return [output, None, 1 / root mean square of each row]."""
    kernel = "rmsnorm_fwd"
    x, weight = _operands(kernel, input, weight, zero_centered_gamma)
    scale_T = (x.square().mean(-1) + eps).rsqrt()
    values = x * scale_T[:, None] * weight
    return [_output(kernel, ln_out, values, otype, quantizer), None, scale_T]


def layernorm_fwd(
    input: Any, weight: Any, bias: Any, eps: float, ln_out: Any, quantizer: Any, otype: Any,
    sm_margin: int, zero_centered_gamma: bool,
) -> list[Tensor]:  # fmt: skip
    """Return [output, mean, 1 / standard deviation of each row]."""
    kernel = "layernorm_fwd"
    x, weight = _operands(kernel, input, weight, zero_centered_gamma)
    mean_T = x.mean(-1)
    scale_T = (x.var(-1, correction=0) + eps).rsqrt()
    values = (x - mean_T[:, None]) * scale_T[:, None] * weight
    if bias is not None:
        values = values + wide(dense(kernel, "the bias", bias))
    return [_output(kernel, ln_out, values, otype, quantizer), mean_T, scale_T]


def _gradients(
    kernel: str, dz: Any, x: Tensor, normed: Tensor, scale_T: Tensor, weight: Tensor, mean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias.

    ``normed`` is the normalised input before the weight; ``mean``: whether a mean was subtracted.
    """
    grad = wide(dense(kernel, "the gradient", dz))
    expect(grad.shape == x.shape, kernel, f"a gradient of {tuple(grad.shape)}")
    expect(
        scale_T.shape == x.shape[:1] and scale_T.dtype == x.dtype,
        kernel,
        f"what forward kept is {tuple(scale_T.shape)} of {scale_T.dtype}",
    )
    inner = grad * weight
    of_input = inner - normed * (inner * normed).mean(-1, keepdim=True)
    if mean:
        of_input = of_input - inner.mean(-1, keepdim=True)
    return of_input * scale_T[:, None], (grad * normed).sum(0), grad.sum(0)


def rmsnorm_bwd(
    dz: Any, x: Any, rsigma: Tensor, gamma: Any, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Return the gradients of [input, weight]."""
    kernel = "rmsnorm_bwd"
    values, weight = _operands(kernel, x, gamma, zero_centered_gamma)
    normed = values * rsigma[:, None]
    dx, dweight, _ = _gradients(kernel, dz, values, normed, rsigma, weight, mean=False)
    return [dx.to(x.dtype), dweight.to(gamma.dtype)]


def layernorm_bwd(
    dz: Any, x: Any, mu: Tensor, rsigma: Tensor, gamma: Any, sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of [input, weight, bias]."""
    kernel = "layernorm_bwd"
    values, weight = _operands(kernel, x, gamma, zero_centered_gamma)
    normed = (values - mu[:, None]) * rsigma[:, None]
    dx, dweight, dbias = _gradients(kernel, dz, values, normed, rsigma, weight, mean=True)
    return [dx.to(x.dtype), dweight.to(gamma.dtype), dbias.to(gamma.dtype)]
