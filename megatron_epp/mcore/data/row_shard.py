"""Sharding of a chunk's rows (tokens and padding) over ranks, outside attention."""

from dataclasses import dataclass
from math import lcm
from typing import Any

from megatron.core import parallel_state as mpu

from megatron_epp.ir import Chunk
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.planner.padding import GPU_ROWS


def row_block(args: Any) -> int:
    """Return the row multiple: a chunk's rows on one rank are padded to a multiple of it.

    The row multiple is --epp-row-multiple. By default, it is 16 for Transformer Engine's layers on
    a GPU, because their tuned norms need a multiple of 4, and because Triton compiles a second
    kernel for sizes that are not multiples of 16. In other cases it is 1. With mxfp8, the result is
    also a multiple of 32, because 32 rows share a scale. With other fp8 recipes, it is a multiple
    of 16, which GEMMs require. If sequence parallelism is added, it is a multiple of 128, because
    the fp8 all-gather needs full blocks.

    Args:
        args: Megatron's args or configuration.
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
    """Return the multiple to which a chunk's rows over all ranks are padded."""
    return row_ranks(args) * row_block(args)


@dataclass(frozen=True, slots=True)
class RowShard:
    """Sharding of a chunk's rows over context-parallel and sequence-parallel ranks.

    A chunk's rows are padded to a multiple of ``parts * splits * block``.

    Attributes:
        parts: Number of context-parallel ranks.
        part: Index of this context-parallel rank.
        splits: Number of tensor-parallel ranks over which sequence parallelism shards a part's
            rows; 1 without sequence parallelism.
        block: The rows of a rank are padded to a multiple of this number (:func:`row_block`).
    """

    parts: int = 1
    part: int = 0
    splits: int = 1
    block: int = 1

    def __post_init__(self):
        assert 0 <= self.part < self.parts and self.splits >= 1 and self.block >= 1

    @classmethod
    def of(cls, args: Any) -> "RowShard":
        """Return this rank's RowShard for ``args``; process groups must be initialised."""
        return cls(
            args.context_parallel_size,
            mpu.get_context_parallel_rank(),
            args.tensor_model_parallel_size if args.sequence_parallel else 1,
            row_block(args),
        )

    @property
    def multiple(self) -> int:
        """Multiple to which a chunk's rows over all ranks are padded."""
        return self.parts * self.splits * self.block

    def padded(self, tokens: int) -> int:
        """Return the number of padded rows of a chunk of ``tokens`` tokens, over all ranks.

        An empty chunk is padded as well, because Megatron's routers need at least one row.
        """
        return -(-max(1, tokens) // self.multiple) * self.multiple

    def rows(self, chunk: Chunk) -> int:
        """Return the number of rows of ``chunk`` over all ranks, including padding."""
        return self.padded(chunk.rows(self.parts))

    def sharded_rows(self, chunk: Chunk) -> int:
        """Return this rank's number of rows of documents sharded over the context-parallel ranks.

        These rows come before the rows of documents that only this rank computes. If no rank
        computes a document of the chunk alone, the number includes the padding.
        """
        if self.parts > 1 and chunk.has_local:
            return -(-chunk.sharded_tokens // self.parts)
        return self.rows(chunk) // self.parts

    def local(self, rows: int) -> slice:
        """Return this context-parallel rank's slice of a chunk that has ``rows`` padded rows."""
        count = rows // self.parts
        return slice(self.part * count, (self.part + 1) * count)

    def message(self, rows: int) -> int:
        """Return how many of a chunk's ``rows`` padded rows this rank sends to another stage."""
        return rows // (self.parts * self.splits)
