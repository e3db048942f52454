"""Runner of a rank's programs, which combines clock, heap, links and executor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_epp.ir import Message, Program, Timed
from megatron_epp.runtime.clock import CudaClock, HostClock
from megatron_epp.runtime.executor import Compute, CurrentOp, Executor, Failure
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.kv_store import StageStores, Store
from megatron_epp.runtime.link import Links
from megatron_epp.runtime.malloc_trim import HostHeap
from megatron_epp.runtime.memory_meter import Meter


@dataclass
class ProgramRunner:
    """Runner of programs on one rank, with the objects that are created once per rank.

    Attributes:
        device: device of the stages.
        current_op: record of the op or phase that the rank is in.
        groups: process groups of the rank; None for a pipeline of one rank without groups.
        catch_errors: whether ranks go on with zeros after any error of an op (see Executor).
        clock: clock of the device.
        heap: heap that is trimmed between ops; None on a GPU.
    """

    device: torch.device
    current_op: CurrentOp
    groups: Groups | None = None
    catch_errors: bool = False
    clock: HostClock | CudaClock = field(init=False)
    heap: HostHeap | None = field(init=False)

    def __post_init__(self) -> None:
        on_gpu = self.device.type == "cuda"
        self.clock = CudaClock() if on_gpu else HostClock()
        self.heap = None if on_gpu else HostHeap()

    def links(self, shape: Callable[[Message], Sequence[int]], dtype: torch.dtype) -> Links:
        """Return new links of this rank for one program.

        Args:
            shape: function that returns the shape of a message.
            dtype: dtype of all messages.
        """
        if self.groups is None:
            return Links({}, shape, dtype, self.device)
        ranks = self.groups.pipeline_ranks
        return Links(self.groups.payload, shape, dtype, self.device, ranks)

    def run(
        self,
        program: Program,
        compute: Compute | Mapping[int, Compute],
        store: Store | StageStores,
        links: Links,
        meter: Meter,
    ) -> tuple[tuple[Timed, ...], Failure | None]:
        """Run a program once on a new executor.

        Args:
            program: ops and transfers of this rank.
            compute: the model of the rank's stage, or a mapping from stage number to model.
            store: K/V caches of all stages of the rank.
            links: links that send and receive the rank's messages.
            meter: meter of the bytes held.

        Returns:
            The records of all ops and transfers, and the failure if an op failed, else None.

        Raises:
            LinkLost: if a message cannot be sent or received.
            OutOfMemory: if this rank is out of memory and its peers did not fail at the same op.
            Exception: any other error of an op, unless ``catch_errors`` is set.
        """
        peers = None if self.groups is None else self.groups.peers
        self.clock.start()
        executor = Executor(
            program, compute, links, store, self.clock, meter, self.current_op, peers, self.heap,
            self.catch_errors,
        )  # fmt: skip
        return executor.run(), executor.failure
