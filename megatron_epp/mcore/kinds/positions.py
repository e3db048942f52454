"""Rotary embedding of a chunk's rows by their positions in their documents."""

from typing import Any

from torch import Tensor, nn

from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.mcore.data.chunk_params import ChunkParams


class PositionedRotary(nn.Module):
    """Rotary embedding by each row's position in its document, instead of positions 0, 1, 2, ...

    This module wraps Megatron's rotary embedding and selects the table rows of a chunk's positions
    from the table of the full context. Row i of the result belongs to row i of the chunk, and the
    chunk is passed to Megatron as one sequence. Therefore a fused kernel, which reads table row i
    for row i of a sequence, also applies the right rotation. For inputs that are not chunks,
    Megatron's own rotary embedding is used.

    Attributes:
        rotary: Megatron's rotary embedding.
        context: Number of rows of the table.
        fused: Whether a fused kernel applies the embedding.
        computed: The current chunk. The loop sets it before a model's forward, because some models
            do not call :meth:`get_rotary_seq_len`. :meth:`forward` then returns the full table, and
            :meth:`replaced` selects the chunk's rows before the layers read them.
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
        """Return ``context`` for a chunk, or Megatron's length for other inputs.

        The chunk's positions are stored for the next call of :meth:`forward`.
        """
        self._positions = None
        params = args[-1] if args else None
        if not isinstance(params, ChunkParams):
            return self.rotary.get_rotary_seq_len(*args)
        self._positions = params.positions
        self._put_boundaries(params)
        return self.context

    def forward(self, length: int, *args: Any, **others: Any) -> Tensor | tuple[Tensor, float]:
        """Return the table rows [t, 1, 1, channels] of the stored positions.

        With YaRN, the result is a pair: these rows, and YaRN's factor.

        If no positions are stored, return the full table if ``computed`` is set, and otherwise the
        result of Megatron's rotary embedding.
        """
        positions, self._positions = self._positions, None
        if positions is None and self.computed is None:
            return self.rotary(length, *args, **others)
        # With packed_seq, the table is full; otherwise Megatron would shard it over CP ranks.
        table = self.rotary(self.context, packed_seq=True)
        if positions is None:
            return table
        self.computed = None  # the layers get the right rows
        return _rows_of(table, positions)

    def replaced(self, table: Any) -> Any:
        """Return the table rows of the positions of ``computed``, and reset ``computed``.

        If ``computed`` or ``table`` is None, return ``table``.
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
