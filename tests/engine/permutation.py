"""Permutation of token rows to experts and back by indices; padding between groups of rows.

Each of T tokens has K experts. ``row_id_map`` [K * T] contains at index k * T + t the row of the
k-th copy of token t, or -1 if this copy was dropped.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.engine.operands import dense, expect, wide


def moe_permute_fwd(
    input: Tensor, dtype: Any, indices: Tensor, num_out_tokens: int, workspace: list[Tensor],
    max_expanded_token_num: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Return ``num_out_tokens`` (0: all) rows by expert, then token; ``row_id_map``; workspace."""
    kernel = "moe_permute_fwd"
    dense(kernel, "the input", input)
    expect(indices.dtype == torch.int32, kernel, f"indices of {indices.dtype}")
    tokens, choices = indices.shape
    order = indices.reshape(-1).sort(stable=True).indices  # positions t K + k
    kept = order[: num_out_tokens or len(order)]
    places = torch.full((choices * tokens,), -1, dtype=torch.int32)
    places[kept % choices * tokens + kept // choices] = torch.arange(len(kept), dtype=torch.int32)
    return input[kept // choices], places, workspace


def moe_unpermute_fwd(
    input: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor, num_tokens: int, topK: int
) -> Tensor:
    """Return the sum of each token's rows, weighted by ``prob`` [T, K] if it is not empty."""
    rows = wide(dense("moe_unpermute_fwd", "the input", input))
    places = row_id_map.view(topK, num_tokens).long()
    result = rows.new_zeros(num_tokens, rows.shape[1])
    for choice in range(topK):
        kept = places[choice] >= 0
        weight = prob[kept, choice, None].to(rows.dtype) if prob.numel() else 1
        result[kept] += rows[places[choice][kept]] * weight
    return result.to(input.dtype)


def moe_permute_bwd(
    input: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor, num_tokens: int, topK: int
) -> Tensor:
    """Return the gradient of the input: the sum of each token's rows, as in the unpermutation."""
    return moe_unpermute_fwd(input, dtype, row_id_map, prob, num_tokens, topK)


def moe_unpermute_bwd(
    input_bwd: Tensor, input_fwd: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the probabilities."""
    grad = wide(dense("moe_unpermute_bwd", "the gradient", input_bwd))
    rows = wide(dense("moe_unpermute_bwd", "the input", input_fwd))
    tokens = len(grad)
    places = row_id_map.view(-1, tokens).long()
    result, of_probs = torch.zeros_like(rows), torch.zeros(tokens, len(places), dtype=torch.float32)
    for choice, place in enumerate(places):
        kept = place >= 0
        weight = prob[kept, choice, None].to(rows.dtype) if prob.numel() else 1
        result[place[kept]] = grad[kept] * weight
        of_probs[kept, choice] = (grad[kept] * rows[place[kept]]).sum(-1).float()
    return result.to(input_bwd.dtype), of_probs


def fused_multi_row_padding(
    input: Tensor, output: Tensor, rows: Sequence[int], padded_rows: Sequence[int]
) -> None:
    """Copy groups of ``rows`` rows to ``output``; pad each group with zeros to ``padded_rows``."""
    expect(sum(rows) == len(input), "fused_multi_row_padding", f"{len(input)} rows for {rows}")
    expect(sum(padded_rows) == len(output), "fused_multi_row_padding", f"{len(output)} rows")
    output.zero_()
    for group, padded in zip(input.split(rows), output.split(padded_rows), strict=True):
        padded[: len(group)] = group


def fused_multi_row_unpadding(
    input: Tensor, output: Tensor, padded_rows: Sequence[int], rows: Sequence[int]
) -> None:
    """Copy groups of rows into ``output`` without their padding."""
    expect(sum(padded_rows) == len(input), "fused_multi_row_unpadding", f"{len(input)} rows")
    for padded, group in zip(input.split(padded_rows), output.split(rows), strict=True):
        group.copy_(padded[: len(group)])
