"""Schedules of torch.distributed.pipelining over gloo, for comparison in benchmarks."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

# By name: torch's schedule, and how stages lie on ranks (planner.choose); None: one a rank.
SCHEDULES: dict[str, tuple[type, str | None]] = {
    "1f1b": (schedules.Schedule1F1B, None),
    "interleaved": (schedules.ScheduleInterleaved1F1B, "interleaved 2"),
    "zb": (schedules.ScheduleInterleavedZeroBubble, "interleaved 2"),
    "zbv": (schedules.ScheduleZBVZeroBubble, "v"),
}


def rank_of_stages(name: str, ranks: int) -> list[int]:
    """Return the rank of every stage in the schedule ``name``."""
    in_turn = [*range(ranks)]
    return in_turn + {None: [], "interleaved 2": in_turn, "v": in_turn[::-1]}[SCHEDULES[name][1]]


def make_schedule(name: str, stages: Sequence[Any], micro_batches: int, loss: Callable) -> Any:
    """Return the schedule ``name`` for this rank's ``stages``; ``loss`` is not scaled."""
    given = stages if SCHEDULES[name][1] else stages[0]
    return SCHEDULES[name][0](given, micro_batches, loss_fn=loss, scale_grads=False)


class GlooStage(pipelining.PipelineStage):
    """Stage that sets ``number`` of its module to the micro-batch that it computes."""

    def _get_init_p2p_neighbors_ops(self) -> list:
        return []  # it makes NCCL's communicators; gloo sends nothing to the same rank

    def forward_one_chunk(self, chunk: int, *args: Any, **named: Any) -> Any:
        self.submod.number = chunk
        return super().forward_one_chunk(chunk, *args, **named)
