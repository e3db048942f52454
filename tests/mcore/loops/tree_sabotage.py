"""Breaks what ties a loop's samples to what they share, another way in every batch.

Run inside a rank (``Trial.interfere``): ``around(number)`` surrounds the computation of a batch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.layers.chunk_state import Rows
from megatron_epp.mcore.loops import slice_stage
from tests.mcore.sabotage_trees import lose_a_branch


def count_shared_tokens_once() -> AbstractContextManager:
    """Of the losses of samples that share tokens the first one's alone has a gradient there."""

    def samples(forest: PrefixForest, outputs: Sequence[Tensor]) -> list[Tensor]:
        met: set[int] = set()
        made = []
        for sequence in range(len(forest.last)):
            path = forest.path(sequence)
            of = [outputs[node].detach() if node in met else outputs[node] for node in path]
            met |= set(path)
            made.append(torch.cat(of))
        return made

    return patch.object(slice_stage, "samples_of", samples)


def join_branches_in_another_order() -> AbstractContextManager:
    """A sample's outputs are those of its branch, and then those of what that continues."""

    def samples(forest: PrefixForest, outputs: Sequence[Tensor]) -> list[Tensor]:
        paths = map(forest.path, range(len(forest.last)))
        return [torch.cat([outputs[node] for node in reversed(path)]) for path in paths]

    return patch.object(slice_stage, "samples_of", samples)


def begin_anew() -> AbstractContextManager:
    """Positions of a branch begin at 0."""
    return patch.object(Rows, "offset", 0)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    lose_a_branch,
    count_shared_tokens_once,
    join_branches_in_another_order,
    begin_anew,
    nullcontext,
)
_BATCHES = count()


def around(number: int) -> AbstractContextManager:
    return WAYS[next(_BATCHES)]()
