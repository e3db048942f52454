"""The rotary embedding of rows that stand anywhere in their documents."""

from typing import Any

from torch import Tensor, nn

from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.mcore.data.chunk_params import ChunkParams


class PositionedRotary(nn.Module):
    """The rotary embedding of each row's own position instead of rows 0, 1, 2, ...

    Wraps Megatron's, whose table is made once for the whole context: its cache is keyed by length.
    The rows are one sequence to Megatron, with a table of their own, so a kernel that counts
    positions from 0 in every sequence (``fused``) finds the right ones, too. What is no chunk has
    Megatron's own.

    ``computed``: the chunk that a model computes which may never ask for its length here. It gets
    the whole table, and what it makes of that is replaced before the layers see it.
    """

    def __init__(self, rotary: Any, context: int, fused: bool):
        super().__init__()
        self.rotary, self.context, self.fused = rotary, context, fused
        self._positions: Tensor | None = None
        self.computed: ChunkParams | None = None

    @property
    def inv_freq(self) -> Tensor:
        """Frequencies, which models of others read."""
        return self.rotary.inv_freq

    def get_rotary_seq_len(self, *args: Any) -> int:
        self._positions = None
        params = args[-1] if args else None
        if not isinstance(params, ChunkParams):
            return self.rotary.get_rotary_seq_len(*args)
        self._positions = params.positions
        self._put_boundaries(params)
        return self.context

    def forward(self, length: int, *args: Any, **others: Any) -> Tensor | tuple[Tensor, float]:
        positions, self._positions = self._positions, None
        if positions is None and self.computed is None:
            return self.rotary(length, *args, **others)
        # packed_seq: the whole table, of which Megatron's context parallelism would take a part.
        table = self.rotary(self.context, packed_seq=True)
        if positions is None:
            return table
        self.computed = None  # the layers see what they must
        return _rows_of(table, positions)

    def replaced(self, table: Any) -> Any:
        """The embedding for the layers, where a model hands them ``table``."""
        params, self.computed = self.computed, None
        if params is None or table is None:
            return table
        self._put_boundaries(params)
        rows = _rows_of(self.rotary(self.context, packed_seq=True), params.positions)
        return rows[0] if isinstance(rows, tuple) else rows

    def _put_boundaries(self, params: ChunkParams) -> None:
        if self.fused:
            boundaries = on_device(params.cu_seqlens_q, params.positions.device)
            params.cu_seqlens_q = params.cu_seqlens_kv = boundaries


def _rows_of(table: Any, positions: Tensor) -> Any:
    if isinstance(table, tuple):  # YaRN's, with the factor that attention applies
        return table[0].index_select(0, positions), table[1]
    return table.index_select(0, positions)
