"""Matrix products with the kernels' epilogues, bias and accumulation; also in groups.

In torch's notation, D = B @ A; with transA or transB, this factor is transposed first. In the
table, ' marks a transposed factor.

    forward            [T, K] x [N, K]'         A weight, transposed     D [T, N]
    gradient of input  [T, N] x [N, K]          A weight                 D [T, K]
    ... of weight      [T, N]' x [T, K]         A input, B transposed    D [N, K]
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from tests.engine.fp8.quantizers import is_quantised, operand, quantize
from tests.engine.operands import dense, expect, no_quantizer, torch_dtype, wide, written

STREAMS = 4
STEP = 16  # divisor of the sizes of quantised operands


def generic_gemm(
    A: Any, transA: bool, B: Any, transB: bool, D: Any, quantizer: Any, output_dtype: Any,
    bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Tensor | None, grad: bool,
    workspace: Tensor, workspace_size: int, accumulate: bool, use_split_accumulator: bool,
    comm_overlap: Any = None, comm_type: Any = None, extra_output: Any = None,
    bulk_overlap: bool = False, alpha: float = 1.0, beta: float | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Return [D, gradient of the bias, None, None].

    With ``grad``, ``bias`` is not added. If ``bias`` is not None, its gradient is returned, which
    is the sum of B's rows.
    """
    kernel = "generic_gemm"
    no_quantizer(kernel, quantizer)
    if comm_overlap is not None or gelu:
        raise NotImplementedError(
            "tests.engine: products that overlap communication, or with GELU, are not written"
        )
    expect(workspace.numel() >= workspace_size > 0, kernel, "the workspace is shorter than said")
    expect(accumulate or not beta, kernel, f"beta {beta} without accumulation")
    product, shape = _product(kernel, A, transA, B, transB)
    product *= alpha
    of_factors = _format(A)
    dtype = of_factors if output_dtype is None else torch_dtype(output_dtype)
    if D is not None:
        dense(kernel, "the output", D)
        fits = D.shape[-1] == shape[-1] and D.numel() == product.numel()
        expect(fits, kernel, f"the output is {tuple(D.shape)}, expected {shape}")
        agrees = output_dtype is None or D.dtype == dtype
        expect(agrees, kernel, f"the output is of {D.dtype}, {dtype} is asked for")
        dtype = D.dtype
    expect(
        torch.promote_types(dtype, of_factors) == dtype,
        kernel,
        f"products of {of_factors} in {dtype}",
    )
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = wide(B.detach()).view(-1, B.shape[-1]).sum(0).to(dtype)
    elif bias is not None:
        expect(bias.shape == shape[-1:], kernel, f"a bias of {tuple(bias.shape)} for {shape}")
        expect(bias.dtype == torch_dtype(bias_type), kernel, f"a bias of {bias.dtype}")
        product += bias.detach()
    if D is not None and accumulate:
        product += D.detach().view(product.shape) * (1.0 if beta is None else beta)
    D = written(kernel, D, product.view(shape), dtype)
    return [D, bias_gradient, None, None]


def _product(
    kernel: str, A: Any, transA: bool, B: Any, transB: bool
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the product [rows, columns] in the accumulation dtype, and the shape of D."""
    both = is_quantised(A), is_quantised(B)
    expect(both[0] == both[1], kernel, "one of A and B is quantised, and the other is not")
    a, b = _factor(kernel, "A", A, not transA), _factor(kernel, "B", B, transB)
    if both[0]:  # quantised values are read in either direction, so their dtypes may differ
        a, b = (x.to(torch.promote_types(a.dtype, b.dtype)) for x in (a, b))
    expect(a.dtype == b.dtype, kernel, f"A is of {a.dtype}, B of {b.dtype}")
    rows_of_a, rows_of_b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    left = rows_of_b.T if transB else rows_of_b
    right = rows_of_a.T if transA else rows_of_a
    expect(
        left.shape[1] == right.shape[0],
        kernel,
        f"A {tuple(a.shape)}{' transposed' * transA} and B {tuple(b.shape)}"
        f"{' transposed' * transB} do not fit",
    )
    inner = left.shape[1]
    expect(not (both[0] and inner % STEP), kernel, f"quantised products over {inner}")
    shape = (left.shape[0] if transB else b.shape[:-1], right.shape[1])
    flat = (shape[0], shape[1]) if transB else (*b.shape[:-1], right.shape[1])
    return wide(left) @ wide(right), tuple(flat)


def _format(tensor: Any) -> torch.dtype:
    """Return the dtype of a tensor; for a quantised tensor, the dtype before quantisation."""
    return tensor._dtype if is_quantised(tensor) else tensor.dtype


def _factor(kernel: str, name: str, tensor: Any, columnwise: bool) -> Tensor:
    if not is_quantised(tensor):
        return dense(kernel, name, tensor)
    values = operand(kernel, name, tensor, columnwise).view(tensor.size())
    return values.to(torch.promote_types(_format(tensor), torch.float32))


def te_general_grouped_gemm(
    A: Sequence[Any], transA: bool, B: Sequence[Any], transB: bool, D: Sequence[Tensor] | None,
    D_type: Any, m_splits: Sequence[int], bias: Sequence[Tensor], bias_type: Any,
    single_output: bool, pre_gelu_out: Sequence[Tensor], grad: bool, workspace: Sequence[Tensor],
    workspace_size: int, accumulate: bool, use_split_accumulator: bool, math_sm_count: int,
) -> list[Tensor]:  # fmt: skip
    """Compute a group of products, and return the list ``bias``.

    With ``single_output``, D has one tensor with the rows of all products. Outputs are written to
    D. With ``grad``, the gradients of biases are written to ``bias``.
    """
    kernel = "te_general_grouped_gemm"
    expect(D is not None, kernel, "outputs that are not given are not written here")
    assert D is not None
    expect(len(workspace) == STREAMS, kernel, f"{len(workspace)} workspaces")
    expect(not any(x.numel() for x in pre_gelu_out), kernel, "GELU in groups is not written")
    dtype = torch_dtype(D_type)
    if single_output:
        rows = [prod(x.size()[:-1]) for x in B]
        expect(list(m_splits) == rows, kernel, f"splits {m_splits} of operands with {rows} rows")
        expect(sum(rows) == len(D[0]), kernel, f"{len(D[0])} rows of output for {sum(rows)}")
        outputs = list(D[0].split(rows))
    else:
        outputs = list(D)
    expect(len(A) == len(B) == len(outputs), kernel, f"{len(A)}, {len(B)}, {len(outputs)} tensors")
    for index, (a, b, out) in enumerate(zip(A, B, outputs, strict=True)):
        has_bias = bool(bias[index].numel())
        if not prod(b.size()) or not prod(a.size()):
            # No kernel runs: an output without accumulation is set to zero, and so is a bias
            # gradient.
            if not accumulate:
                out.zero_()
            if grad and has_bias:
                bias[index].zero_()
            continue
        results = generic_gemm(
            a, transA, b, transB, out, None, dtype, bias[index] if has_bias else None,
            bias_type, False, None, grad, workspace[0], workspace_size, accumulate,
            use_split_accumulator,
        )  # fmt: skip
        if grad and has_bias:
            gradient = results[1]
            assert gradient is not None
            written(kernel, bias[index], gradient, gradient.dtype)
    return list(bias)


def get_num_cublas_streams() -> int:
    """Return the number of streams of grouped products."""
    return STREAMS


def bgrad_quantize(tensor: Tensor, quantizer: Any) -> list[Tensor]:
    """Return [sum of the rows, the tensor]; a quantizer quantises the returned tensor."""
    rows = wide(dense("bgrad_quantize", "the gradient", tensor)).view(-1, tensor.shape[-1])
    quantized = tensor if quantizer is None else quantize(tensor, quantizer)
    return [rows.sum(0).to(tensor.dtype), quantized]
