"""Runs a rank's programs: puts clock, heap, links and executor together, in one place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_epp.ir import Message, Program, Timed
from megatron_epp.runtime.clock import CudaClock, HostClock
from megatron_epp.runtime.executor import Compute, CurrentOp, Executor, Failure, LinkEnds
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.kv_store import StageStores, Store
from megatron_epp.runtime.link import Links
from megatron_epp.runtime.malloc_trim import HostHeap
from megatron_epp.runtime.memory_meter import Meter


@dataclass
class ProgramRunner:
    """Runner of programs on ``device``, one after another: what a rank has once, whatever stages
    lie on it. A stage's own are ``compute`` and ``store``; of a rank with several, both are of all
    of them (executor.py).

    groups   to the pipeline's other ranks; None where there are none
    """

    device: torch.device
    current_op: CurrentOp
    groups: Groups | None = None
    clock: HostClock | CudaClock = field(init=False)
    heap: HostHeap | None = field(init=False)  # trimmed between ops, on hosts without a GPU

    def __post_init__(self) -> None:
        on_gpu = self.device.type == "cuda"
        self.clock = CudaClock() if on_gpu else HostClock()
        self.heap = None if on_gpu else HostHeap()

    def links(self, shape: Callable[[Message], Sequence[int]], dtype: torch.dtype) -> LinkEnds:
        """This rank's ends of its links for one program; ``shape`` of every message."""
        if self.groups is None:
            return Links({}, shape, dtype, self.device)
        ranks = self.groups.pipeline_ranks
        return Links(self.groups.payload, shape, dtype, self.device, ranks)

    def run(
        self,
        program: Program,
        compute: Compute | Mapping[int, Compute],
        store: Store | StageStores,
        links: LinkEnds,
        meter: Meter,
    ) -> tuple[tuple[Timed, ...], Failure | None]:
        """Every op's record, and the op that ran out of memory, if one did."""
        peers = None if self.groups is None else self.groups.peers
        self.clock.start()
        executor = Executor(
            program, compute, links, store, self.clock, meter, self.current_op, peers, self.heap
        )
        return executor.run(), executor.failure
