"""Packed-sequence parameters that carry a chunk's state through Megatron's layers."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_epp.layers.chunk_state import ChunkState


@dataclass(kw_only=True)
class ChunkParams(PackedSeqParams):
    """Parameters of a chunk that Megatron passes to every layer, also when a layer is recomputed.

    Megatron treats this rank's t rows of the chunk as one sequence [0, t).

    Attributes:
        state: State of the chunk, including the documents of its rows.
        positions: [t] position of each row of this rank in its document, for the rotary embedding.
        mtp_tokens: [D, t] input tokens of the D MTP modules for these rows; None without MTP, and
            on stages other than the last.
    """

    state: ChunkState
    positions: Tensor
    mtp_tokens: Tensor | None = None

    @classmethod
    def of(
        cls, state: ChunkState, positions: Tensor, mtp_tokens: Tensor | None = None
    ) -> "ChunkParams":
        """Return the parameters of a chunk, with ``cu_seqlens`` of one sequence of all rows."""
        # On the CPU, because the unfused rotary embedding reads cu_seqlens with .tolist(), which
        # must not wait for a device. The fused embedding needs them on the device
        # (PositionedRotary).
        rows = positions.shape[0]
        boundaries = torch.tensor([0, rows], dtype=torch.int32)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=rows,
            max_seqlen_kv=rows,
            state=state,
            positions=positions,
            mtp_tokens=mtp_tokens,
        )

    def repeated(self, layers: int) -> "ChunkParams":
        """Return a copy with which a shared MTP layer runs again (:meth:`ChunkState.again`)."""
        return replace(self, state=self.state.again(layers))


def state_of(arguments: dict[str, Any]) -> ChunkState | None:
    """Return the chunk's state in the keyword ``arguments`` of a layer's forward, or None."""
    params = arguments.get("packed_seq_params")
    return params.state if isinstance(params, ChunkParams) else None
