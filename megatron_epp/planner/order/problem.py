"""Scheduling problems: seconds, bytes and dependencies of a chunking's ops, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron_epp.cost.chunk_tables import ChunkTables
from megatron_epp.cost.columns import CHUNKS, PAIRS, TOKENS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.loads import (
    Loads,
    TreeLoads,
    join_loads,
    local_of,
    over_ranks,
    padded,
    plan_loads,
)
from megatron_epp.ir import BACKWARDS, KEEP, KIND_CODE, OF_HEAD, OF_LAYERS, Kind, Payload, rules_for
from megatron_epp.planner.block_table import BlockLoads, TreeBlockLoads, tables_of
from megatron_epp.planner.chunks.block import BlockChunking
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.slicing import Rates
from megatron_epp.planner.chunks.trees import TreeChunking
from megatron_epp.sim.engine import OpArrays
from megatron_epp.sim.inputs import moved_bytes, op_arrays

_OPS_OF_CHUNK = (Kind.FORWARD, Kind.BACKWARD)


def rates_of(cost: Cost) -> Rates:
    """Return the seconds of F plus B, with LM head, per token, pair, chunk: mean over stages."""
    per = cost.seconds.per(Kind.FORWARD) + cost.seconds.per(Kind.BACKWARD)
    per = per + cost.seconds.per(Kind.HEAD) + cost.seconds.per(Kind.HEAD_WEIGHT)
    mean, layout = per.mean(axis=0).tolist(), cost.layout
    windows = tuple(
        (each.size, mean[layout.columns.index(each)]) for each in layout.columns.windows
    )
    others = tuple(
        (each, mean[layout.columns.index(each)]) for each in layout.columns.extra[len(windows) :]
    )
    of_kinds = cost.seconds.exchange_per_token
    exchange = float((of_kinds[Kind.FORWARD] + of_kinds[Kind.BACKWARD]).mean())
    tokens = {kind: float(cost.seconds.per(kind)[:, TOKENS].mean()) for kind in _OPS_OF_CHUNK}
    host_ops = tuple(
        (taken / sum(tokens.values()), float(cost.seconds.host[kind].mean()))
        for kind, taken in tokens.items()
    )
    hosts = host_ops if any(host for _, host in host_ops) else ()
    return Rates(mean[TOKENS], mean[PAIRS], mean[CHUNKS], windows, others, exchange, hosts)


def loads_of(chunking: Chunking, lengths: np.ndarray, multiple: int = 1) -> Loads:
    """Return the numbers of tokens and pairs, and the slices, of each chunk of ``chunking``.

    ``lengths`` [documents] are in tokens, in the order of the documents' numbers in ``chunking``.
    Tokens include padding to a multiple of ``multiple``, but pairs do not. For a lockstep group of
    replicas, the result also contains the loads of each replica (planner.block_table).
    """
    if isinstance(chunking, TreeChunking):
        of, prefixes = chunking.tree.lengths, chunking.tree.prefixes
        chunks = chunking.ir_chunks(range(len(of)))
        return plan_loads(chunks, of, multiple=multiple, prefixes=prefixes)
    if isinstance(chunking, BlockChunking):
        members = tuple(loads_of(member, lengths, multiple) for member in chunking.members)
        if isinstance(leader := chunking.members[0], TreeChunking):
            return TreeBlockLoads.of(members, leader.continued)
        groups = np.maximum(chunking.document, 0)
        cut = np.where(chunking.document >= 0, chunking.slice_tokens, 0)
        of_groups = np.bincount(groups, weights=cut, minlength=chunking.groups)
        own = _loads(chunking, of_groups, multiple)
        return BlockLoads(**{f.name: getattr(own, f.name) for f in fields(Loads)}, members=members)
    return _loads(chunking, lengths, multiple)


def _loads(chunking: Chunking, lengths: np.ndarray, multiple: int) -> Loads:
    cut = chunking.document >= 0
    same = cut[1:] & (chunking.document[1:] == chunking.document[:-1])
    number = np.arange(chunking.count)
    earlier = np.full(chunking.count, -1, dtype=np.int64)
    later = np.full(chunking.count, -1, dtype=np.int64)
    earlier[1:][same] = number[:-1][same]
    later[:-1][same] = number[1:][same]
    tokens, pairs, local = chunking.tokens, chunking.pairs.astype(np.float64), None
    if chunking.rank is not None:
        spans, of_spans = chunking.spans, (chunking.chunk, chunking.rank)
        sizes = chunking.ranks, chunking.count
        local = local_of(*of_spans, spans.tokens, *sizes)
        tokens = over_ranks(*of_spans, spans.tokens, *sizes).astype(np.int64)
        pairs = over_ranks(*of_spans, spans.pairs, *sizes)
    return Loads(
        tokens=padded(tokens, multiple).astype(np.float64),
        pairs=pairs,
        cut_tokens=chunking.slice_tokens.astype(np.float64),
        document=chunking.document,
        earlier=earlier,
        later=later,
        lengths=lengths.astype(np.float64),
        spans=(chunking.chunk, chunking.spans.start, chunking.spans.stop),
        local=local,
    )


def ops_of(ops: OpArrays, chunks: slice | np.ndarray) -> OpArrays:
    """Return ``ops`` with the seconds and bytes of ``chunks`` only, in that order."""
    names = ("seconds", "link_seconds", "moved_bytes")
    of: dict[str, Any] = {n: np.ascontiguousarray(getattr(ops, n)[..., chunks]) for n in names}
    return ops._replace(**of)


@dataclass(frozen=True, slots=True)
class ScheduleProblem:
    """Seconds and bytes of a chunking's ops, and the orders of its chunks.

    Attributes:
        ops: seconds and bytes of every op, in the simulator's format.
        backward_order: [chunks] chunks in the order of their backwards.
        last_of_group: [chunks] last chunk whose forward must precede each chunk's backward.
        headroom_bytes: [ranks] memory budget of a device minus its model states.
        place: rank of every stage; () if stage i is on rank i.
    """

    ops: OpArrays
    backward_order: np.ndarray
    last_of_group: np.ndarray
    headroom_bytes: np.ndarray
    place: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ops.seconds.shape[1]

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.ops.seconds.shape[2]

    @property
    def vocabulary_parallel(self) -> bool:
        """Whether ops H and G of vocabulary parallelism exist."""
        return len(self.ops.link_seconds) == len(Payload)

    @property
    def of_in_flight(self) -> tuple[np.ndarray, np.ndarray]:
        """``ops.moved_bytes`` and ``headroom_bytes`` for methods that only simulate F and B.

        Bytes held from H to G are counted as if held from F to B. The most memory that an H or G
        requires while it runs is subtracted from the headroom.
        """
        moves = self.ops.moved_bytes
        if not self.vocabulary_parallel:
            return moves, self.headroom_bytes
        head, head_weight = (KIND_CODE[kind] for kind in OF_HEAD)
        left = moves[head, 0] - moves[head, 1]
        moves = moves.copy()
        moves[KIND_CODE[Kind.FORWARD], 0] += left
        for kind in BACKWARDS:
            moves[KIND_CODE[kind], 1] += left
        aside = np.maximum(moves[head, 1], moves[head_weight, 0]).max(axis=1, initial=0.0)
        return moves, self.headroom_bytes - aside


def with_unrecomputed(cost: Cost, counts: Counts, chunks: int) -> Counts:
    """Return ``counts``, plus mode KEEP (save activations) for all layers without a mode."""
    return {**counts, **every_layer(KEEP, left_layers(cost, counts, chunks))}


def left_layers(cost: Cost, counts: Counts, chunks: int) -> list[np.ndarray]:
    """Return, per layer kind, the number [stages, chunks] of layers without mode in ``counts``."""
    left = [np.tile(layers[:, None], (1, chunks)) for layers in cost.layout.kinds.counts]
    for (kind, _), grid in counts.items():
        left[kind] = left[kind] - grid
    return left


def every_layer(mode: str, left: list[np.ndarray]) -> Counts:
    """Return counts with ``mode`` for ``left[k]`` layers [stages, chunks] of each kind k."""
    return {(kind, mode): grid for kind, grid in enumerate(left)}


class ChunkProblems:
    """Scheduling problems of one chunking for different numbers of recomputed layers.

    Args:
        cost: cost model, including the stages and parallel degrees.
        chunking: the chunks.
        loads: numbers of tokens and query-key pairs of the chunks.
        split: whether to compute I and W, which only split backwards use.
    """

    def __init__(self, cost: Cost, chunking: Chunking, loads: Loads, split: bool = True):
        self.cost, self.chunking, self.loads = cost, chunking, loads
        kinds = OF_LAYERS if split else (Kind.FORWARD, Kind.BACKWARD)
        every = rules_for(cost.layout.vocabulary_parallel)
        self._rules = {k: rule for k, rule in every.items() if k in (*kinds, *OF_HEAD)}
        self._tables = tables_of(cost, loads, kinds)
        self._fixed_bytes: np.ndarray | None = None
        self._kept: OpArrays | None = None  # the ops without recompute, if known

    @classmethod
    def of_each(
        cls,
        cost: Cost,
        chunkings: Sequence[Chunking],
        loads: Sequence[Loads],
        split: bool = True,
    ) -> "list[ChunkProblems]":
        """Build the problems of several chunkings together, which takes little longer than one.

        Args:
            cost: cost model, including the stages and parallel degrees.
            chunkings: chunks of every problem.
            loads: tokens and query-key pairs of the chunks of every chunking.
            split: whether to compute I and W, which only split backwards use.
        """
        every = [cls(cost, *each, split) for each in zip(chunkings, loads, strict=True)]
        if len(every) == 1 or any(isinstance(each, BlockLoads | TreeLoads) for each in loads):
            return every
        joined = cls(cost, chunkings[0], join_loads(loads), split)
        ops, at = joined._ops({}), 0
        assert isinstance(joined._tables, ChunkTables) and joined._fixed_bytes is not None
        for problems, tables in zip(every, joined._tables.parts(), strict=True):
            chunks = slice(at, at + problems.loads.chunks)
            at = chunks.stop
            problems._tables, problems._fixed_bytes = tables, joined._fixed_bytes[..., chunks]
            earlier = np.asarray(problems.loads.earlier, np.int64)
            problems._kept = ops_of(ops, chunks)._replace(earlier=earlier)
        return every

    def _ops(self, counts: Counts) -> OpArrays:
        table = self._tables.of_counts(with_unrecomputed(self.cost, counts, self.loads.chunks))
        if self._fixed_bytes is None:
            self._fixed_bytes = moved_bytes(table, self.loads, self._rules, recomputed=False)
        return op_arrays(table, self.loads, self._rules, fixed_bytes=self._fixed_bytes)

    def of(self, counts: Counts) -> ScheduleProblem:
        """Return the problem for ``counts`` (layers by layer kind and recompute mode)."""
        kept = None if counts else self._kept
        return ScheduleProblem(
            ops=self._ops(counts) if kept is None else kept,
            backward_order=self.chunking.backward,
            last_of_group=self.chunking.last_of_group,
            headroom_bytes=self.cost.headroom_bytes,
            place=self.cost.layout.place,
        )
