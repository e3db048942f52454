"""Padding between groups of rows, which are multiplied by different weights."""

from collections.abc import Sequence

from torch import Tensor

from tests.engine.operands import expect


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
