"""Seconds and bytes of a block of replicas in lockstep, from the tables of its replicas.

An op of the block takes as long as the op of the slowest replica, because the replicas' ranks
communicate within its layers. Bytes are an upper bound for each replica. A chunk of the block holds
the maximum of the bytes over the replicas. K/V of all documents that a replica has in a group of
positions count from the group's first forward to its last backward. The K/V gradients of the
largest of these documents count while any backward of the group runs.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.chunk_tables import ChunkTables
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import DOCUMENT_ITEMS, OF_LAYERS, Item, Kind, Table
from megatron_epp.sim.in_step import in_step


@dataclass(frozen=True, slots=True)
class BlockLoads(Loads):
    """Loads of a block's chunks (planner.chunks.block.BlockChunking) and of its replicas' chunks.

    ``members`` contains the loads of every replica. A replica's chunks are at the block's
    positions, but hold the replica's own documents.
    """

    members: tuple[Loads, ...]


class BlockTables:
    """Tables of a block's chunks: seconds of the slowest replica, and bytes that suffice for all.

    Args:
        cost: cost of the layout.
        loads: loads of the block and of its replicas.
        kinds: op kinds of the tables.
    """

    def __init__(self, cost: Cost, loads: BlockLoads, kinds: Sequence[Kind] = OF_LAYERS):
        self.loads = loads
        self.members = [cost.tables(member, kinds=kinds) for member in loads.members]

    def of_counts(self, counts: Counts) -> Table:
        """Return the block's table for recompute ``counts``, like :meth:`ChunkTables.of_counts`."""
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
    """Return :class:`BlockTables` for the loads of a block, else ``cost.tables``."""
    if isinstance(loads, BlockLoads):
        return BlockTables(cost, loads, kinds)
    return cost.tables(loads, kinds=kinds)


def block_seconds(cost: Cost, kind: Kind, loads: Loads) -> np.ndarray:
    """Return [stages, chunks] seconds of an op kind.

    For the loads of a block, return the seconds of the slowest replica.
    """
    if isinstance(loads, BlockLoads):
        return np.max([cost.seconds.of(kind, member) for member in loads.members], axis=0)
    return cost.seconds.of(kind, loads)


def _of_groups(item: Item, of_members: Sequence[np.ndarray], loads: BlockLoads) -> np.ndarray:
    """Return [stages, groups]: the most that any member's documents in a group hold.

    The K/V bytes of a member's documents in a group are summed. Of their K/V gradients only the
    largest counts, because the documents run their backwards one after the other.
    """
    most = np.zeros((of_members[0].shape[0], len(loads.lengths)))
    for held, member in zip(of_members, loads.members, strict=True):
        cut = np.flatnonzero((member.document >= 0) & (member.earlier < 0))
        group, documents = loads.document[cut], member.document[cut]
        group_most = np.zeros_like(most.T)
        add = np.add if item is Item.KV else np.maximum
        add.at(group_most, group, held[:, documents].T)
        most = np.maximum(most, group_most.T)
    return most
