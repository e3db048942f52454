"""Faults of routers."""

from importlib import import_module

import torch

from megatron_epp.layers.moe import current_chunk
from megatron_epp.layers.moe.router_stats import RouterStats
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing

# Megatron's package has a function of this name, too.
FINALIZE = import_module("megatron.core.distributed.finalize_model_grads")


def spans(stats: RouterStats, state) -> list[int]:
    """Of a chunk, on all ranks."""
    keys = [(rows.span.document, rows.span.start) for rows in state.rows]
    return [stats.spans[key] for key in (*keys, *((d, 0) for d in state.local_documents))]


def count_padding(owners, stats: RouterStats, state):
    found = owners(stats, state)
    found[found == len(stats.spans)] = spans(stats, state)[-1]
    return found


def mix_documents(owners, stats: RouterStats, state):
    found = owners(stats, state)
    found[found < len(stats.spans)] = spans(stats, state)[0]
    return found


def sum_too_early(balanced, stats: RouterStats, logits, scored, layer, state, first, share):
    found = balanced(stats, logits, scored, layer, state, first, share)
    if first and layer == stats.layers - 1 and stats._sums_3SLE is not None:
        stats._sum_over_ranks(state, logits)
    return found


def forget_the_state(during, chunk: current_chunk.CurrentChunk, state):
    again = state is not None and chunk.state is None and torch._C._current_graph_task_id() >= 0
    return during(chunk, None if again else state)


def twice(update, *arguments, **named) -> None:
    update(*arguments, **named)
    update(*arguments, **named)


FAULTS: Faults = {
    "nothing": nothing,
    # A chunk is one document, as a micro-batch is to Megatron.
    "mix documents": fault(RouterStats, "_owners", mix_documents),
    # Ranks add up a document's tokens when its first slice comes by, and not again.
    "sum too early": fault(RouterStats, "balanced", sum_too_early),
    # Experts that are recomputed alone do not know which chunk they run again.
    "forget the state": fault(current_chunk.CurrentChunk, "during", forget_the_state),
    "nothing again": nothing,
    # As after an attempt that failed and was repeated, if nothing brought the bias back. From here
    # on the bias is not where it should be.
    "move the bias twice": fault(FINALIZE, "_update_router_expert_bias", twice),
    # Rows of padding count as tokens of the chunk's last document.
    "count padding": fault(RouterStats, "_owners", count_padding),
    # A recomputed layer counts its tokens a second time.
    "count again": fault(
        RouterStats, "first_time", lambda first_time, *where: first_time(*where) or True
    ),
}
around = in_turn(FAULTS)
