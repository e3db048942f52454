"""Faults of documents on one of the context-parallel ranks.

No fault may keep a rank from a collective that others are in.
"""

from unittest.mock import patch

from megatron_epp.layers.attention import local
from megatron_epp.mcore.data import chunk_batches
from megatron_epp.mcore.data.chunk_batches import ChunkBatchBuilder
from megatron_epp.mcore.kinds.attention import module as elastic_attention
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def lose_every_place(tensors, builder: ChunkBatchBuilder, chunk: int):
    found = tensors(builder, chunk)
    content = builder.plan.chunks[chunk]
    if content.has_local:
        found.positions[0][builder.row_shard.sharded_rows(content) :] = 0
    return found


def take_the_other_ranks_documents(inputs, builder: ChunkBatchBuilder, chunk: int):
    plain = chunk_batches.chunk_rows

    def rows(plan, slices, chunk, rank=-1):
        return plain(plan, slices, chunk, rank if rank < 0 else 1 - rank)

    with patch.object(chunk_batches, "chunk_rows", rows):
        yield from list(inputs(builder, chunk))


def exchange_local_rows(attention_parts, ulysses, q_tHD, k_tGD, v_tGD, state):
    qkv = q_tHD, k_tGD, v_tGD
    if state.local is None or not state.tokens:
        return attention_parts(ulysses, *qkv, state)
    spread = local.sharded_rows(state, ulysses)
    after = (x[spread:].clone() for x in qkv)
    return (*(x[: state.tokens] for x in ulysses.to_heads(*qkv)), *after)


def give_rows_back_out_of_turn(attend_parts, parts, state, ulysses, spread, of_local):
    def reversed_rows(q, k, v):
        out, again = of_local(q, k, v)
        return out.flip(0), again

    return attend_parts(parts, state, ulysses, spread, reversed_rows)


# In every third batch, the first one among them, all documents are sharded.
FAULTS: Faults = {
    "nothing": nothing,
    # Rotary positions of local rows are all 0; by any constant more they would be right.
    "lose every place": fault(ChunkBatchBuilder, "_tensors", lose_every_place),
    # Tokens, positions and labels of local documents are those of the next rank.
    "take the other ranks documents": fault(
        ChunkBatchBuilder, "_inputs", take_the_other_ranks_documents
    ),
    "nothing again": nothing,
    # All rows go through the all-to-all, those of local documents, too: what is attended to as
    # sharded is not what is.
    "exchange local rows": fault(elastic_attention, "attention_parts", exchange_local_rows),
    # What attention makes of local rows is put in the place of others.
    "give rows back out of turn": fault(
        elastic_attention, "attend_parts", give_rows_back_out_of_turn
    ),
    "nothing spread": nothing,
    "nothing local": nothing,
    "nothing local again": nothing,
}
around = in_turn(FAULTS)
