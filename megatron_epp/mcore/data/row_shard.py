"""Shard of a chunk's rows that a rank holds outside attention."""

from dataclasses import dataclass
from math import lcm
from typing import Any

from megatron.core import parallel_state as mpu

from megatron_epp.ir import Chunk
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.planner.padding import GPU_ROWS


def row_block(args: Any) -> int:
    """Return the multiple of a rank's rows, from Megatron's args or configuration.

    On a GPU, Transformer Engine's tuned norms need a multiple of 4 (the others are slower, and from
    4096 columns on cooperative). Triton compiles another kernel for sizes that 16 does not divide.
    In fp8, GEMMs need 16 rows; a scale of MXFP8 covers 32, which it does not pad. Blocks of 128 are
    padded, but with sequence parallelism, an all-gather in fp8 needs full ones.
    """
    block: int | None = getattr(args, "epp_row_multiple", None)
    if block is None:
        by_engine = getattr(args, "transformer_impl", None) == "transformer_engine"
        block = GPU_ROWS if by_engine and cpu_host.has_gpu_kernels() else 1
    if not getattr(args, "fp8", None):
        return block
    if args.fp8_recipe == "mxfp8":
        return lcm(block, 32)
    sharded = args.sequence_parallel and args.tensor_model_parallel_size > 1
    return lcm(block, 128 if sharded else 16)


def row_ranks(args: Any) -> int:
    """Return the number of ranks over which the rows of a chunk are sharded."""
    tensor = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return args.context_parallel_size * tensor


def chunk_multiple(args: Any) -> int:
    """Return the multiple of a chunk's rows."""
    return row_ranks(args) * row_block(args)


@dataclass(frozen=True, slots=True)
class RowShard:
    """Sharding of a chunk's rows into ``parts``, one per context-parallel rank; ``part`` is ours.

    With sequence parallelism, a part's rows are sharded over ``splits`` tensor-parallel ranks
    between the linear layers. Rows are padded to a multiple of both, and of a rank's ``block``.
    """

    parts: int = 1
    part: int = 0
    splits: int = 1
    block: int = 1

    def __post_init__(self):
        assert 0 <= self.part < self.parts and self.splits >= 1 and self.block >= 1

    @classmethod
    def of(cls, args: Any) -> "RowShard":
        """Return this rank's shard in a job with Megatron's ``args``; its groups must exist."""
        return cls(
            args.context_parallel_size,
            mpu.get_context_parallel_rank(),
            args.tensor_model_parallel_size if args.sequence_parallel else 1,
            row_block(args),
        )

    @property
    def multiple(self) -> int:
        """Multiple to which a chunk's rows are padded."""
        return self.parts * self.splits * self.block

    def padded(self, tokens: int) -> int:
        """Return the padded rows of a chunk of ``tokens``, over all ranks.

        An empty chunk has one row per rank: Megatron's routers accept no tensor without rows.
        """
        return -(-max(1, tokens) // self.multiple) * self.multiple

    def rows(self, chunk: Chunk) -> int:
        """Return the rows of a chunk's tensors over all ranks, including padding."""
        return self.padded(chunk.rows(self.parts))

    def sharded_rows(self, chunk: Chunk) -> int:
        """Return the number of a rank's rows from documents that are sharded over all ranks.

        They come first; the rows of documents computed by this rank alone follow.
        """
        if self.parts > 1 and chunk.has_local:
            return -(-chunk.sharded_tokens // self.parts)
        return self.rows(chunk) // self.parts

    def local(self, rows: int) -> slice:
        """Return this rank's contiguous slice of a chunk's padded ``rows``."""
        count = rows // self.parts
        return slice(self.part * count, (self.part + 1) * count)

    def message(self, rows: int) -> int:
        """Return the number of a chunk's padded ``rows`` that this rank sends to the next stage."""
        return rows // (self.parts * self.splits)
