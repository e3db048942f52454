"""Exchange of rows for heads around a scan, if a chunk's rows are sharded over CP ranks.

A state passes through all rows of a document, but heads are independent. The ranks therefore
exchange rows for heads, as for attention (layers/attention/ulysses.py). A document on one rank has
all its rows and heads there, so it is not exchanged (layers/attention/local.py).

Shape suffixes: t rows of this rank, s of them exchanged; T = N s exchanged rows of all N ranks; C
channels of a row; H heads with P output channels each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_epp.layers.attention.local import sharded_rows
from megatron_epp.layers.attention.ulysses import Ulysses
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.concatenated import concatenated


@dataclass(frozen=True, slots=True)
class Section:
    """Channels of a projection: ``heads`` heads of ``size`` channels, one head after the other."""

    heads: int
    size: int

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.heads * self.size


# (rows [T, C], their state, whether they have this rank's heads only) -> outputs [T, H, P]
Scan = Callable[[Tensor, ChunkState, bool], Tensor]


def scan_by_heads(
    rows_tC: Tensor,
    sections: Sequence[Section],
    state: ChunkState,
    ulysses: Ulysses | None,
    scan: Scan,
) -> Tensor:
    """Return the outputs [t, H, P] of ``scan`` for this rank's rows.

    Args:
        rows_tC: [local rows, channels] rows of this rank.
        sections: sections into which the channels of the rows are divided.
        state: state of the chunk.
        ulysses: the all-to-all; None without context parallelism.
        scan: function from (rows, state, whether the rows have only this rank's heads) to outputs.
    """
    if ulysses is None:
        return scan(rows_tC, state, False)
    sharded_count, outputs = sharded_rows(state, ulysses), []
    if sharded_count:
        of_section = rows_tC[:sharded_count].split([one.channels for one in sections], 1)
        parts = [
            x.unflatten(1, (one.heads, -1)) for x, one in zip(of_section, sections, strict=True)
        ]
        local_TC = torch.cat([x.flatten(1) for x in ulysses.each_to_heads(parts)], 1)
        outputs.append(ulysses.to_rows(scan(local_TC, state, True)))
    if state.local is not None and len(rows_tC) > sharded_count:
        outputs.append(scan(rows_tC[sharded_count:], state.local, False))
    return concatenated(outputs)
