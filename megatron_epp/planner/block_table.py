"""Seconds and bytes of a block of replicas in lockstep, from the tables of its replicas.

An op takes as long as on the slowest replica, because the ranks of all replicas communicate within
the op's layers. Bytes are an upper bound for every replica: a chunk of the block holds the maximum
over the replicas. A group consists of consecutive chunks in which each replica runs the slices of
its documents, one document after the other. K/V of a replica's documents in a group are counted
from the group's first forward to its last backward. K/V gradients are counted while the backwards
of the group run. Unless documents share prefixes, only the K/V gradients of each replica's largest
document in the group are counted.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_epp.cost.chunk_tables import ChunkTables
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.loads import Loads, TreeLoads
from megatron_epp.ir import DOCUMENT_ITEMS, OF_LAYERS, CachedDocument, Item, Kind, Table
from megatron_epp.sim.in_step import in_step


@dataclass(frozen=True, slots=True)
class BlockLoads(Loads):
    """Numbers of tokens and query-key pairs of each chunk, for the block and every replica in it.

    A block is a lockstep group of replicas (planner.chunks.block). ``members`` contains the loads
    of each replica, whose chunk k runs at the same time as chunk k of the block.
    """

    members: tuple[Loads, ...]


@dataclass(frozen=True)  # no slots, because results are cached
class TreeBlockLoads(BlockLoads, TreeLoads):
    """Loads of a block whose replicas have documents that continue others.

    Documents of several replicas may have cached K/V and begin in the same chunk. They count as one
    cached document of the block, whose ``readers`` are the readers of all of them.
    """

    @classmethod
    def of(cls, members: Sequence[Loads], earlier: np.ndarray) -> "TreeBlockLoads":
        """Return the loads of ``members``, whose chunk c runs after chunk ``earlier[c]``."""
        readers: dict[int, set[int]] = {}  # by first chunk
        for each in (document for member in members for document in member.kept or ()):
            readers.setdefault(each.first, set()).update(each.readers)
        kept = [
            CachedDocument(n, at, tuple(sorted(readers[at])), ()) for n, at in enumerate(readers)
        ]
        document = np.full(len(earlier), -1, np.int64)
        document[[*readers]] = range(len(kept))
        most: dict[str, Any] = {
            name: np.max([getattr(each, name) for each in members], axis=0)
            for name in ("tokens", "pairs", "cut_tokens")
        }
        for name, stores_last_slice in (("read", False), ("lone", True)):
            cached = [each.cached_tokens(stores_last_slice) for each in members]
            most[name] = np.max(cached, axis=0)
        busiest = np.argmax([each.pairs for each in members], axis=0)
        spans = [np.array(each.spans) for each in members]
        shown = [of[:, busiest[of[0]] == who] for who, of in enumerate(spans)]
        chunk, start, stop = np.concatenate(shown, axis=1)
        return cls(
            **most,
            document=document,
            earlier=earlier,
            later=np.full(len(earlier), -1, np.int64),
            lengths=np.zeros(len(kept)),
            spans=(chunk, start, stop),
            kept=kept,
            boundaries_of=((),) * len(kept),
            members=tuple(members),
        )


class BlockTables:
    """Tables of a lockstep group's chunks: seconds of the slowest replica, largest bytes of all.

    Args:
        cost: cost model, including the stages and parallel degrees.
        loads: tokens and query-key pairs of the group's chunks and of each replica's chunks.
        kinds: op kinds that the tables contain.
    """

    def __init__(self, cost: Cost, loads: BlockLoads, kinds: Sequence[Kind] = OF_LAYERS):
        self.loads = loads
        self.members = [cost.tables(member, kinds=kinds) for member in loads.members]

    def of_counts(self, counts: Counts) -> Table:
        """Return the table for ``counts``: number of layers by layer kind and recompute mode."""
        tables = [member.of_counts(counts) for member in self.members]
        combined = in_step(tables)[0]
        held: dict[Item, np.ndarray] = {}
        for item in tables[0].held_bytes:
            of_members = [np.asarray(table.held_bytes[item]) for table in tables]
            held[item] = (
                _of_groups(item, of_members, self.loads)
                if item in DOCUMENT_ITEMS
                else np.max(of_members, axis=0)
            )
        return dataclasses.replace(
            combined,
            held_bytes=held,
            workspace_bytes={
                kind: np.max([table.workspace_bytes[kind] for table in tables], axis=0)
                for kind in tables[0].workspace_bytes
            },
        )


def tables_of(
    cost: Cost, loads: Loads, kinds: Sequence[Kind] = OF_LAYERS
) -> ChunkTables | BlockTables:
    """Return the tables of ``loads``: :class:`BlockTables` for a lockstep group of replicas."""
    if isinstance(loads, BlockLoads):
        return BlockTables(cost, loads, kinds)
    return cost.tables(loads, kinds=kinds)


def block_seconds(cost: Cost, kind: Kind, loads: Loads) -> np.ndarray:
    """Return the seconds of an op kind as an array [stages, chunks].

    If ``loads`` are of a lockstep group, the seconds are those of the slowest replica.
    """
    if isinstance(loads, BlockLoads):
        return np.max([cost.seconds.of(kind, member) for member in loads.members], axis=0)
    return cost.seconds.of(kind, loads)


def _of_groups(item: Item, of_members: Sequence[np.ndarray], loads: BlockLoads) -> np.ndarray:
    """Return the bytes of each group's documents on the replica with the most: [stages, groups].

    K/V bytes of a replica's documents in a group are added up. K/V gradients count only for the
    largest document, because the documents run their backwards one after the other, unless they
    continue each other.
    """
    most = np.zeros((of_members[0].shape[0], len(loads.lengths)))
    for held, member in zip(of_members, loads.members, strict=True):
        first = np.flatnonzero((member.document >= 0) & (member.earlier < 0))
        documents = member.document[first]
        if loads.kept is not None:
            cached = [(each.first, each.document) for each in member.kept or ()]
            first, documents = np.array(cached, np.int64).reshape(-1, 2).T
        group_most = np.zeros_like(most.T)
        add = np.add if item is Item.KV or loads.kept is not None else np.maximum
        add.at(group_most, loads.document[first], held[:, documents].T)
        most = np.maximum(most, group_most.T)
    return most
