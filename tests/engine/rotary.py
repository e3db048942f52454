"""Rotary embeddings of [S, B, H, D], [B, S, H, D] or packed [T, H, D].

Channels beyond the table of angles are unchanged. The first position of sequence i is 0, or
``start_positions[i]``. On C context-parallel ranks, a sequence has 2 C parts: rank r has
part r, and then part 2 C - 1 - r.
"""

from itertools import pairwise

import torch
from torch import Tensor

from tests.engine.enums import NVTE_QKV_Format as Format
from tests.engine.operands import expect, wide


def fused_rope_forward(
    input: Tensor, freqs: Tensor, start_positions: Tensor | None, qkv_format: Format,
    interleaved: bool, cu_seqlens: Tensor | None, cp_size: int, cp_rank: int,
) -> Tensor:  # fmt: skip
    """Return the rotated input."""
    table = _table(input, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    return _turned(input, table, interleaved, 1)


def fused_rope_backward(
    output_grads: Tensor, freqs: Tensor, start_positions: Tensor | None, qkv_format: Format,
    interleaved: bool, cu_seqlens: Tensor | None, cp_size: int, cp_rank: int,
) -> Tensor:  # fmt: skip
    """Return the gradient of the input: ``output_grads`` rotated back."""
    grads = output_grads
    table = _table(grads, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    return _turned(grads, table, interleaved, -1)


def _table(
    x: Tensor, freqs: Tensor, starts: Tensor | None, layout: Format, cu_seqlens: Tensor | None,
    ranks: int, rank: int,
) -> Tensor:  # fmt: skip
    """Return the angles of every row; the dimension of heads has size 1."""
    kernel = "fused_rope"
    expect(freqs.dim() == 4 and freqs.shape[1:3] == (1, 1), kernel, f"a table {freqs.shape}")
    expect(freqs.dtype in (torch.float32, torch.float64), kernel, f"a table of {freqs.dtype}")
    expect(freqs.is_contiguous(), kernel, "the table does not lie in one piece")
    expect(x.stride(-1) == 1, kernel, f"channels are {x.stride(-1)} apart")
    angles = freqs[:, 0, 0]
    expect(angles.shape[1] <= x.shape[-1], kernel, f"{angles.shape[1]} angles for {x.shape}")
    if layout == Format.NVTE_THD:
        expect(cu_seqlens is not None and cu_seqlens.dtype == torch.int32, kernel, "lengths")
        assert cu_seqlens is not None
        # Boundaries of full sequences: a rank has its part of each.
        boundaries = [int(boundary) // ranks for boundary in cu_seqlens]
        expect(
            boundaries[-1] <= len(x), kernel, f"{len(x)} rows for sequences up to {boundaries[-1]}"
        )
        lengths = [stop - start for start, stop in pairwise(boundaries)]
        positions = torch.cat(
            [_positions(n, ranks, rank) + _start(starts, i) for i, n in enumerate(lengths)]
            # Rows after the last sequence have no kernel, and must not be read.
            + [torch.zeros(len(x) - boundaries[-1], dtype=torch.long)]
        )
        expect(_most(positions) < len(angles), kernel, f"the table ends at {len(angles)}")
        return angles[positions][:, None]
    expect(layout in (Format.NVTE_SBHD, Format.NVTE_BSHD), kernel, f"layout {layout.name}")
    length, batch = (x.shape[0], x.shape[1]) if layout == Format.NVTE_SBHD else x.shape[1::-1]
    rows = torch.stack(
        [_positions(length, ranks, rank) + _start(starts, i) for i in range(batch)], 1
    )
    expect(_most(rows) < len(angles), kernel, f"the table ends at {len(angles)}")
    selected = angles[rows][:, :, None]  # S, B, 1, D
    return selected if layout == Format.NVTE_SBHD else selected.transpose(0, 1)


def _most(positions: Tensor) -> int:
    return int(positions.max()) if positions.numel() else 0


def _start(starts: Tensor | None, sequence: int) -> int:
    return 0 if starts is None else int(starts[sequence])


def _positions(rows: int, ranks: int, rank: int) -> Tensor:
    if ranks == 1:
        return torch.arange(rows)
    half = rows // 2
    first = torch.arange(half)
    return torch.cat([first + rank * half, first + (2 * ranks - 1 - rank) * half])


def _turned(x: Tensor, angles: Tensor, interleaved: bool, sign: int) -> Tensor:
    size = angles.shape[-1]
    turned, rest = wide(x.detach()[..., :size]), x.detach()[..., size:]
    if interleaved:
        # The table is (a, a, b, b, ...): pairs are adjacent.
        partner = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        partner = torch.cat([-second, first], -1)
    result = turned * angles.cos() + sign * partner * angles.sin()
    return torch.cat([result.to(x.dtype), rest], -1).contiguous()
