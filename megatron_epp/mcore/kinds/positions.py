"""Rotary embedding of rows at arbitrary positions of their documents."""

from typing import Any

from torch import Tensor, nn

from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.mcore.data.chunk_params import ChunkParams


class PositionedRotary(nn.Module):
    """Rotary embedding by each row's own position, instead of rows 0, 1, 2, ...

    It wraps Megatron's, whose table is made once for the whole context: its cache is keyed by
    length. Megatron sees the rows as one sequence with a table of their own. So a kernel that
    counts positions from 0 in every sequence (``fused``) finds the right ones, too. Inputs that are
    not chunks use Megatron's own.

    ``computed`` is the chunk of a model that may never ask for its length here. It gets the full
    table, and its result is replaced before the layers read it.
    """

    def __init__(self, rotary: Any, context: int, fused: bool):
        super().__init__()
        self.rotary, self.context, self.fused = rotary, context, fused
        self._positions: Tensor | None = None
        self.computed: ChunkParams | None = None

    @property
    def inv_freq(self) -> Tensor:
        """Frequencies, which models of frameworks read."""
        return self.rotary.inv_freq

    def get_rotary_seq_len(self, *args: Any) -> int:
        """Return the context for a chunk, and remember its positions; else Megatron's length."""
        self._positions = None
        params = args[-1] if args else None
        if not isinstance(params, ChunkParams):
            return self.rotary.get_rotary_seq_len(*args)
        self._positions = params.positions
        self._put_boundaries(params)
        return self.context

    def forward(self, length: int, *args: Any, **others: Any) -> Tensor | tuple[Tensor, float]:
        """Return the table rows of the chunk's positions, with YaRN's factor if there is one."""
        positions, self._positions = self._positions, None
        if positions is None and self.computed is None:
            return self.rotary(length, *args, **others)
        # packed_seq: the full table; Megatron's context parallelism would take a part of it.
        table = self.rotary(self.context, packed_seq=True)
        if positions is None:
            return table
        self.computed = None  # the layers get the right rows
        return _rows_of(table, positions)

    def replaced(self, table: Any) -> Any:
        """Return the rotary embedding for the layers, in place of a model's ``table``."""
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
