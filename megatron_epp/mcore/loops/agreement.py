"""Agreement of the ranks that plan a call together: all go on, or all raise an error."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_epp.runtime.consensus import all_gathered
from megatron_epp.runtime.program_runner import ProgramRunner


class LoopRefusal(ValueError):
    """Error: no schedule can run the input of the loop; raised on every rank."""


class LoopFailed(RuntimeError):
    """Error: another rank of the call failed; the message contains the rank and its error."""


class Arrivals:
    """Count of the calls that each rank of ``group`` has begun, in torch.distributed's store."""

    def __init__(self, group: dist.ProcessGroup):
        self._ranks, self._count = dist.get_process_group_ranks(group), 0

    def arrive(self) -> None:
        """Count a call of this rank."""
        self._count = self._add(dist.get_rank(), 1)

    def missing(self) -> list[int]:
        """Return the ranks that have begun fewer calls than this rank."""
        return [rank for rank in self._ranks if self._add(rank, 0) < self._count]

    def _add(self, rank: int, calls: int) -> int:
        store = dist.distributed_c10d._get_default_store()
        return int(store.add(f"megatron_epp/calls of a loop/{self._ranks}/{rank}", calls))


def exchange[T](programs: ProgramRunner, phase: str, make: Callable[[], T]) -> list[T]:
    """Call ``make`` on every rank of the replica; all-gather the results in rank order.

    Replicas that run in lockstep count as one replica. No rank blocks if ``make`` raises on some
    ranks only. If ``programs`` has no groups, errors of ``make`` are raised unchanged.

    Args:
        programs: The runner of this rank's programs, with the groups of the replica.
        phase: The phase in which this rank waits for the others; the watcher reports it.
        make: Function that returns this rank's result, which must be picklable.

    Raises:
        LoopRefusal: ``make`` raised a ValueError on a rank; the message is from the first such
            rank.
        LoopFailed: ``make`` raised another exception on another rank; the message is from the
            first such rank.
        Exception: ``make`` raised any other exception on this rank. If an earlier rank raised a
            ValueError, the function raises LoopRefusal instead, because wrong rows of that rank may
            be the cause.
    """
    if programs.groups is None:
        return [make()]
    control, rank = programs.groups.control, dist.get_rank()
    own: Any
    raised: Exception | None = None
    try:
        own = make()
    except ValueError as error:
        own, raised = LoopRefusal(f"rank {rank}: {error}"), error
    except Exception as error:
        own, raised = LoopFailed(f"rank {rank}: {type(error).__name__}: {error}"), error
    programs.current_op.enter(phase)
    every = all_gathered(own, control)
    earlier = every[: control.rank()]
    if isinstance(own, LoopFailed) and not any(isinstance(one, LoopRefusal) for one in earlier):
        assert raised is not None, "this rank failed"
        raise raised
    for kind in (LoopRefusal, LoopFailed):
        for one in every:
            if isinstance(one, kind):
                raise one from raised
    return every
