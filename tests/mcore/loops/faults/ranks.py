"""Faults of slices that context-parallel ranks share: one rank's rows for another's."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.mcore.loops import slice_stage
from megatron_epp.mcore.loops.adapters.samples import Samples
from megatron_epp.mcore.loops.forward_steps import ForwardSteps
from megatron_epp.mcore.loops.slice_stage import SliceStage
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def neighbours_rows(share: RowShard, rows: int) -> slice:
    count, neighbour = rows // share.parts, (share.part + 1) % share.parts
    return slice(neighbour * count, (neighbour + 1) * count)


def with_the_neighbours_rows(original, stage: SliceStage | ForwardSteps, *given: Any) -> Any:
    with patch.object(RowShard, "local", neighbours_rows):
        return original(stage, *given)


def losses_of_parts() -> AbstractContextManager:
    """No mistake: each rank's loss is of some rows, as in loops that cut them themselves."""
    plain = Samples.loss

    def of_a_part(
        self: Samples, micro_batch: Any, outputs: Sequence[Tensor], non_loss_data: bool = False
    ) -> Any:
        rank, ranks = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
        mine = [
            torch.where(torch.arange(len(one)) % ranks == rank, one, one.detach())
            for one in outputs
        ]
        made = plain(self, micro_batch, mine, non_loss_data)
        if non_loss_data or len(made) == 2:
            return made
        loss, count, told = made
        return loss, torch.zeros_like(count) if rank else count, told

    return patch.multiple(Samples, loss=of_a_part, partial_loss=True, create=True)


@contextmanager
def leave_parts_apart() -> Iterator[None]:
    """Each rank's backward begins with the gradient of its own part of the loss alone."""
    with losses_of_parts(), patch.object(slice_stage, "_of_all_parts", lambda own, group: own):
        yield


FAULTS: Faults = {
    "nothing": nothing,
    # The loss sees each rank's outputs where its neighbour's belong.
    "gather from the wrong rank": fault(
        slice_stage,
        "_of_all_ranks",
        lambda of_all_ranks, mine, group: of_all_ranks(mine, group).roll(len(mine), 0),
    ),
    # A rank computes the tokens of another one, at places of its own.
    "draw the neighbours rows": fault(ForwardSteps, "_drawn", with_the_neighbours_rows),
    # A rank's backward begins with the loss' gradient at another one's tokens.
    "start from the neighbours rows": fault(SliceStage, "_run_backward", with_the_neighbours_rows),
    "nothing but losses of parts": losses_of_parts,
    "leave parts apart": leave_parts_apart,
}
around = in_turn(FAULTS)
