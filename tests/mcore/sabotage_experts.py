"""Breaks routers on purpose, another way in every batch: what a certificate must notice.

Run inside a rank (``Trial.interfere``), as sabotage.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from unittest.mock import patch

import torch

from megatron_epp.layers.moe import current_chunk
from megatron_epp.layers.moe.router_stats import RouterStats


def documents(state) -> list[int]:
    """Of a chunk, on all ranks."""
    return [rows.span.document for rows in state.rows] + list(state.local_documents)


def count_padding() -> AbstractContextManager:
    """Rows of padding count as tokens of the chunk's last document."""
    plain = RouterStats._owners

    def owners(self: RouterStats, state):
        found = plain(self, state)
        found[found == len(self.tokens)] = documents(state)[-1]
        return found

    return patch.object(RouterStats, "_owners", owners)


def count_again() -> AbstractContextManager:
    """A recomputed layer counts its tokens a second time."""
    plain = RouterStats.first_time

    def first_time(self: RouterStats, layer: int, chunk: int) -> bool:
        plain(self, layer, chunk)
        return True

    return patch.object(RouterStats, "first_time", first_time)


def mix_documents() -> AbstractContextManager:
    """A chunk is one document, as a micro-batch is to Megatron."""
    plain = RouterStats._owners

    def owners(self: RouterStats, state):
        found = plain(self, state)
        found[found < len(self.tokens)] = documents(state)[0]
        return found

    return patch.object(RouterStats, "_owners", owners)


def sum_too_early() -> AbstractContextManager:
    """Ranks add up a document's tokens when its first slice comes by, and not again."""
    plain = RouterStats.balanced

    def balanced(self: RouterStats, logits, scored, layer, state, first, share):
        found = plain(self, logits, scored, layer, state, first, share)
        if first and layer == self.layers - 1 and self._counts_DLE is not None:
            self._sum_over_ranks(state)
        return found

    return patch.object(RouterStats, "balanced", balanced)


def forget_the_state() -> AbstractContextManager:
    """Experts that are recomputed alone do not know which chunk they run again."""
    plain = current_chunk.CurrentChunk.during

    def during(self: current_chunk.CurrentChunk, state):
        again = state is not None and self.state is None and torch._C._current_graph_task_id() >= 0
        return plain(self, None if again else state)

    return patch.object(current_chunk.CurrentChunk, "during", during)


def move_the_bias_twice() -> AbstractContextManager:
    """As after an attempt that failed and was repeated, if nothing brought the bias back."""
    module = import_module("megatron.core.distributed.finalize_model_grads")
    plain = module._update_router_expert_bias

    def update(*args, **others) -> None:
        plain(*args, **others)
        plain(*args, **others)

    return patch.object(module, "_update_router_expert_bias", update)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    mix_documents,
    sum_too_early,
    forget_the_state,
    nullcontext,
    move_the_bias_twice,  # from here on the bias is not where it should be
    count_padding,
    count_again,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number]()
