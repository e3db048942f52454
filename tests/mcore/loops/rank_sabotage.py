"""Mistakes, where context-parallel ranks share slices, one rank's rows for another's; another way
in every batch.

Run inside a rank (``Trial.interfere``): ``around(number)`` surrounds the computation of a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from megatron_epp.mcore.data.row_share import RowShare
from megatron_epp.mcore.loops import slice_stage
from megatron_epp.mcore.loops.adapters.samples import Samples
from megatron_epp.mcore.loops.slice_stage import SliceStage


def gather_from_the_wrong_rank() -> AbstractContextManager:
    """The loss sees each rank's outputs where its neighbour's belong."""
    plain = slice_stage._of_all_ranks

    def of_all(mine: Tensor, group: Any) -> Tensor:
        return plain(mine, group).roll(len(mine), 0)

    return patch.object(slice_stage, "_of_all_ranks", of_all)


def _neighbours_rows(self: RowShare, rows: int) -> slice:
    count, neighbour = rows // self.parts, (self.part + 1) % self.parts
    return slice(neighbour * count, (neighbour + 1) * count)


def _mistaken_in(name: str) -> AbstractContextManager:
    plain = getattr(SliceStage, name)

    def mistaken(self: SliceStage, *given: Any) -> Any:
        with patch.object(RowShare, "mine", _neighbours_rows):
            return plain(self, *given)

    return patch.object(SliceStage, name, mistaken)


def draw_the_neighbours_rows() -> AbstractContextManager:
    """A rank computes the tokens of another one, at places of its own."""
    return _mistaken_in("_drawn")


def start_from_the_neighbours_rows() -> AbstractContextManager:
    """A rank's backward begins with the loss' gradient at another one's tokens."""
    return _mistaken_in("_run_backward")


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


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    gather_from_the_wrong_rank,
    draw_the_neighbours_rows,
    start_from_the_neighbours_rows,
    losses_of_parts,
    leave_parts_apart,
)
_BATCHES = count()


def around(number: int) -> AbstractContextManager:
    return WAYS[next(_BATCHES)]()
