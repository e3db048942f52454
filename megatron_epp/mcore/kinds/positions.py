"""Rotary embedding of rows at arbitrary positions of their documents."""

from typing import Any

from torch import Tensor, nn

from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.mcore.data.chunk_params import ChunkParams


class PositionedRotary(nn.Module):
    """Rotary embedding by each row's position in its document, instead of rows 0, 1, 2, ...

    This module wraps Megatron's rotary embedding, whose table is computed once for the full
    context. Megatron treats the rows of a chunk as one sequence, and gets the table's rows of their
    positions. A fused kernel that counts positions from 0 in every sequence therefore reads the
    right table rows. Inputs that are not chunks use Megatron's rotary embedding.

    Attributes:
        rotary: Megatron's rotary embedding.
        context: Number of rows of the table.
        fused: Whether a fused kernel applies the embedding.
        computed: The chunk of a model that may not call :meth:`get_rotary_seq_len`. The model then
            gets the full table, which :meth:`replaced` replaces before the layers read it.
    """

    def __init__(self, rotary: Any, context: int, fused: bool):
        super().__init__()
        self.rotary, self.context, self.fused = rotary, context, fused
        self._positions: Tensor | None = None
        self.computed: ChunkParams | None = None

    @property
    def inv_freq(self) -> Tensor:
        """Inverse frequencies of Megatron's rotary embedding, which frameworks' models read."""
        return self.rotary.inv_freq

    def get_rotary_seq_len(self, *args: Any) -> int:
        """Return the context for a chunk, or Megatron's length for other inputs.

        The chunk's positions are stored for the next :meth:`forward`.
        """
        self._positions = None
        params = args[-1] if args else None
        if not isinstance(params, ChunkParams):
            return self.rotary.get_rotary_seq_len(*args)
        self._positions = params.positions
        self._put_boundaries(params)
        return self.context

    def forward(self, length: int, *args: Any, **others: Any) -> Tensor | tuple[Tensor, float]:
        """Return the table rows of the stored positions, with YaRN's factor if there is one.

        Without stored positions, return the full table for ``computed``, or Megatron's own result.
        """
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
        """Return the table rows of ``computed``'s positions instead of ``table``, and reset it.

        Without ``computed``, return ``table``.
        """
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
