"""Rows of a chunk that a rank holds outside attention."""

from dataclasses import dataclass
from math import lcm
from typing import Any

from megatron.core import parallel_state as mpu

from megatron_epp.ir import Chunk
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.planner.padding import GPU_ROWS


def row_block(args: Any) -> int:
    """Return what the rows of a rank come in multiples of; of Megatron's args or configuration.

    On a GPU Transformer Engine's tuned norms want a multiple of 4 (the others are slower, and from
    4096 columns on cooperative), and Triton compiles another kernel for sizes that 16 does not
    divide. In fp8, products over rows want 16 of them; a scale of MXFP8 has 32, which it does not
    pad. Blocks of 128 are padded, but rows are gathered in fp8 over tensor-parallel ranks by whole
    ones only.
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
    """Return the number of ranks that the rows of a chunk are sharded over."""
    tensor = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return args.context_parallel_size * tensor


def chunk_multiple(args: Any) -> int:
    """Return what the rows of a chunk come in multiples of."""
    return row_ranks(args) * row_block(args)


@dataclass(frozen=True, slots=True)
class RowShard:
    """A chunk's rows are split into ``parts``, one per context-parallel rank, this one's ``part``;
    with sequence parallelism a part's rows are split over ``splits`` tensor-parallel ranks between
    the linear layers. So rows are padded to a multiple of both, and of the ``block`` that a rank's
    come in.
    """

    parts: int = 1
    part: int = 0
    splits: int = 1
    block: int = 1

    def __post_init__(self):
        assert 0 <= self.part < self.parts and self.splits >= 1 and self.block >= 1

    @classmethod
    def of(cls, args: Any) -> "RowShard":
        """This rank's share in a job with Megatron's ``args``, once its groups are made."""
        return cls(
            args.context_parallel_size,
            mpu.get_context_parallel_rank(),
            args.tensor_model_parallel_size if args.sequence_parallel else 1,
            row_block(args),
        )

    @property
    def multiple(self) -> int:
        return self.parts * self.splits * self.block

    def padded(self, tokens: int) -> int:
        """Rows of a chunk of ``tokens``, over all ranks; one each of an empty chunk, as Megatron's
        routers take no tensor without rows."""
        return -(-max(1, tokens) // self.multiple) * self.multiple

    def rows(self, chunk: Chunk) -> int:
        """Rows of a chunk's tensors over all ranks, padding included."""
        return self.padded(chunk.rows(self.parts))

    def sharded_rows(self, chunk: Chunk) -> int:
        """The first of a rank's rows of a chunk: its share of what is local to none. Behind them
        are those local to it."""
        if self.parts > 1 and chunk.has_local:
            return -(-chunk.sharded_tokens // self.parts)
        return self.rows(chunk) // self.parts

    def local(self, rows: int) -> slice:
        """This rank's of a chunk's padded ``rows``, one behind the other."""
        count = rows // self.parts
        return slice(self.part * count, (self.part + 1) * count)

    def message(self, rows: int) -> int:
        """How many of a chunk's padded ``rows`` this rank hands to the next stage."""
        return rows // (self.parts * self.splits)
