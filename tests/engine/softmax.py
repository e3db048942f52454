"""Softmax of scaled scores [B, H, T, S]: plain, masked, or causal."""

import torch
from torch import Tensor

from tests.engine.operands import dense, expect, wide


def _softmax(kernel: str, scores: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    values = wide(dense(kernel, "the scores", scores)) * scale
    if hidden is not None:
        values = values.masked_fill(hidden, -torch.inf)
    # A row that sees nothing is zero.
    return values.softmax(-1).nan_to_num(0.0).to(scores.dtype)


def _causal(scores: Tensor) -> Tensor:
    """Return the causal mask aligned at the bottom right: the last row sees all columns."""
    rows, columns = scores.shape[-2:]
    return torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)


def scaled_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Return the softmax without a mask."""
    return _softmax("scaled_softmax_forward", input, scale_factor, None)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """Return the softmax with a mask [B, 1, T, S] of hidden scores."""
    kernel = "scaled_masked_softmax_forward"
    expect(mask.is_contiguous() and mask.dim() == 4, kernel, f"a mask of {tuple(mask.shape)}")
    expect(mask.dtype in (torch.bool, torch.uint8), kernel, f"a mask of {mask.dtype}")
    return _softmax(kernel, input, scale_factor, mask.bool())


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Return the causal softmax of square scores."""
    kernel = "scaled_upper_triang_masked_softmax_forward"
    expect(input.shape[-1] == input.shape[-2], kernel, f"scores of {tuple(input.shape)}")
    return _softmax(kernel, input, scale_factor, _causal(input))


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    """Return the causal softmax aligned at the bottom right."""
    kernel = "scaled_aligned_causal_masked_softmax_forward"
    return _softmax(kernel, input, scale_factor, _causal(input))


def softmax_backward(output_grad: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """Return the gradient of the scores; it has the same formula for all four functions."""
    kernel = "softmax backward"
    grad = wide(dense(kernel, "the gradient", output_grad))
    probabilities = wide(dense(kernel, "the softmax", softmax_results))
    inner = grad * probabilities
    values = (inner - probabilities * inner.sum(-1, keepdim=True)) * scale_factor
    return values.to(output_grad.dtype)
