"""Chunks of documents with shared prefixes on replicas in lockstep, which run one order of ops.

    replica 0   p0 p1 a  b  c        a, b and c continue p1, which continues p0
    replica 1   q  r  d  e  .        d and e continue q; r begins another tree; .: an empty chunk
    backwards   a  b  c  p1 p0       of positions, valid on both replicas

A position is the index of a chunk. The positions form trees, first those of the replica with the
most chunks. A chunk of another replica takes a free position in the subtree of the position of the
chunk that it continues, so that the order of backwards is valid for this replica, too. Of these
positions, it takes the one that adds the least seconds, since a position takes as long as the
slowest replica's chunk. If a new position adds less, the chunk takes that.
"""

from collections.abc import Sequence

import numpy as np

from megatron_epp.planner.chunks.block import BlockChunking
from megatron_epp.planner.chunks.chunking import Chunking, starts_of
from megatron_epp.planner.chunks.params import ChunkingParams
from megatron_epp.planner.chunks.tree_cutting import Tree
from megatron_epp.planner.chunks.trees import TreeChunking, build_trees, pre_order


def build_tree_block(
    params: ChunkingParams, trees: Sequence[Tree], most_tokens: int, multiple: int = 1
) -> Chunking:
    """Return the chunks of a lockstep group of replicas, or of a single replica.

    Args:
        params: parameters of the chunks; the number of chunks is that of the slowest replica.
        trees: the documents of each replica.
        most_tokens: maximum number of tokens of a chunk.
        multiple: number of tokens; slice boundaries are multiples of it.
    """
    target = max(tree.total for tree in trees) / params.chunks
    members = [build_trees(params, tree, target, most_tokens, multiple) for tree in trees]
    if len(members) == 1:
        return members[0]
    positions, continued, begins = _positions(members)
    groups = pre_order(continued)
    order = [position for group in groups for position in group]
    new = np.empty(len(order) + 1, np.int64)
    new[[*order, -1]] = [*range(len(order)), -1]
    of_groups = starts_of(np.array([*map(len, groups)])), new[np.array(continued)[order]]
    block = BlockChunking.of(
        [
            TreeChunking.of_tree(each.tree, each.spans, new[own[each.chunk]], *of_groups)
            for each, own in zip(members, positions, strict=True)
        ],
        trees[0].rates,
    )
    return block.arranged(np.argsort([begins[group[0]] for group in groups], kind="stable"))


def _positions(
    members: Sequence[TreeChunking],
) -> tuple[list[np.ndarray], list[int], list[float]]:
    """Return the position of every replica's chunks, and what is known of each position.

    That is the position that it continues, or -1, and where it is among the chunks of the first
    replica that has it, as a fraction.
    """
    most = sum(each.count for each in members)
    seconds, continued, begins = np.zeros(most), list[int](), list[float]()
    below = np.zeros((most + 1, most), np.bool_)  # whether a position continues another; -1: all
    positions = [np.empty(each.count, np.int64) for each in members]
    for who in sorted(range(len(members)), key=lambda who: -members[who].count):
        each, own, free = members[who], positions[who], np.ones(most, np.bool_)
        rates, chunks = each.tree.rates, (each.spans, each.chunk, each.tokens, each.pairs)
        taken = rates.chunk_spans_seconds(*chunks) + rates.chunk_seconds
        sizes = each.last_of_group + 1 - np.arange(each.count)  # of the subtrees
        roots = sizes[each.starts[:-1]][each.group]
        for chunk in np.lexsort((-taken, -sizes, each.group, -roots)).tolist():
            after = own[each.continued[chunk]] if each.continued[chunk] >= 0 else -1
            able = np.flatnonzero(below[after] & free)
            places = 1 + np.count_nonzero(below[able] & free, axis=1)
            missing = taken.mean() * np.maximum(sizes[chunk] - places, 0)
            more = np.maximum(taken[chunk] - seconds[able], 0) + missing
            if len(able) and more.min() < taken[chunk] + taken.mean() * (sizes[chunk] - 1):
                closest = np.abs(seconds[able] - taken[chunk])
                position = able[np.lexsort((closest, places, more))[0]]
            else:
                position = len(continued)
                if after >= 0:
                    below[:, position] = below[:, after]
                below[[after, -1], position] = True
                continued.append(int(after))
                begins.append(chunk / each.count)
            own[chunk], free[position] = position, False
            seconds[position] = max(seconds[position], taken[chunk])
    return positions, continued, begins
