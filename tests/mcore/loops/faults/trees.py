"""Faults of what ties a loop's samples to what they share."""

from collections.abc import Sequence
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.layers.chunk_state import Rows
from megatron_epp.mcore.loops import slice_stage
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing
from tests.mcore.faults import trees


def shared_tokens_once(samples_of, forest: PrefixForest, outputs: Sequence[Tensor]) -> list[Tensor]:
    met: set[int] = set()
    made = []
    for sequence in range(len(forest.last)):
        path = forest.path(sequence)
        of = [outputs[node].detach() if node in met else outputs[node] for node in path]
        met |= set(path)
        made.append(torch.cat(of))
    return made


def branches_in_another_order(
    samples_of, forest: PrefixForest, outputs: Sequence[Tensor]
) -> list[Tensor]:
    paths = map(forest.path, range(len(forest.last)))
    return [torch.cat([outputs[node] for node in reversed(path)]) for path in paths]


FAULTS: Faults = {
    "nothing": nothing,
    "lose a branch": trees.FAULTS["lose a branch"],
    # Of the losses of samples that share tokens the first one's alone has a gradient there.
    "count shared tokens once": fault(slice_stage, "samples_of", shared_tokens_once),
    # A sample's outputs are those of its branch, and then those of what that continues.
    "join branches in another order": fault(slice_stage, "samples_of", branches_in_another_order),
    # Positions of a branch begin at 0.
    "begin anew": lambda: patch.object(Rows, "offset", 0),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
