"""Tables of seconds and bytes of the same chunks with different recompute modes.

Recompute changes the seconds of recompute, the activations that a chunk holds, and the workspaces
of F, B and I. All other numbers are computed once.

Offloaded layers are copied to host memory during F and back during B or I, one layer at a time.
Copies in the two directions do not slow each other down:

    seconds[s, c] = max(seconds without copies, offloaded[s, c] * saved_bytes[c] / host rate)

Here offloaded[s, c] is the number of offloaded layers, and saved_bytes[c] are the bytes of one of
them. This assumes that offloaded layers are distributed evenly (ir.recompute.offload_among). As in
Transformer Engine's CPU offloading, at most two of them are on the device at a time, one in use and
one being copied. The bytes of both count during the whole op, because a layer is copied back before
it runs. Host memory is counted separately (cost.host_memory). The time that an op waits for a copy
counts as communication.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from megatron_epp.cost.backward_peak import BackwardPeak, LayerRun, runs_of_counts
from megatron_epp.cost.ends import Ends
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.loads import Loads
from megatron_epp.cost.memory import ChunkMemory
from megatron_epp.cost.seconds import OpSeconds
from megatron_epp.ir import (
    BACKWARDS,
    DOCUMENT_ITEMS,
    IN_FLIGHT,
    KEEP,
    OF_LAYERS,
    OFFLOAD,
    Item,
    Kind,
    Payload,
    Table,
)

# Cached properties of tables with arrays [stages, chunks] by kind or payload.
_OF_CHUNKS = ("_workspace", "_seconds", "_comm", "_links")


def _cut[K](rows: Mapping[K, np.ndarray], chunks: slice) -> dict[K, np.ndarray]:
    return {key: np.asarray(row)[:, chunks] for key, row in rows.items()}


class ChunkTables:
    """Tables of the chunks of ``loads``, for different recompute modes.

    Args:
        seconds: seconds of ops, from a :class:`~megatron_epp.cost.cost.Cost`.
        memory: bytes of states and chunks, from the same Cost.
        ends: embedding and LM head, from the same Cost.
        loads: loads of the chunks.
        forward_only: whether plans are forward-only. Such plans save nothing: the activations of
            one layer exist at a time. Activations of embedding and LM head count during all of F.
        kinds: kinds of ops of layers that the tables contain; default: F, B, I and W.
    """

    def __init__(
        self,
        seconds: OpSeconds,
        memory: ChunkMemory,
        ends: Ends,
        loads: Loads,
        forward_only: bool = False,
        kinds: Sequence[Kind] = OF_LAYERS,
    ):
        self.seconds, self.memory, self.ends = seconds, memory, ends
        self.layout = memory.layout
        self.loads, self.forward_only, self.kinds = loads, forward_only, tuple(kinds)
        self.backwards = tuple(kind for kind in BACKWARDS if kind in self.kinds)

    def of_counts(self, counts: Counts) -> Table:
        """Return the table for ``counts``: layers [stages, chunks] by (kind, recompute mode).

        The modes of a stage's layers of one kind are assumed to have the order of the entries in
        ``counts``. Layers that save everything are last; offloaded layers may be anywhere.
        """
        return self.of_runs(counts, runs_of_counts(self.memory, self.loads, counts))

    def of_runs(self, counts: Counts, runs: Sequence[LayerRun]) -> Table:
        """Return the table as :meth:`of_counts` does, with layers in the order of ``runs``.

        ``runs`` are in the order of backward: the last layers of a stage come first.
        """
        counts = dict(sorted(counts.items()))  # sums do not depend on the order of ``counts``
        loads, memory = self.loads, self.memory
        recompute = np.zeros((self.layout.stages, loads.chunks))
        for choice, count in counts.items():
            if choice[1] not in (KEEP, OFFLOAD):
                recompute += count * self.seconds.recompute(choice, loads)
        host = self.seconds.host_of(Kind.BACKWARD, loads)
        recompute = self.seconds.exposed_recompute(counts, recompute, self._device_backward, host)
        workspace = dict(self._workspace)
        workspace[Kind.FORWARD] = memory.forward_workspace_bytes(loads, counts)
        for kind in self.backwards:
            workspace[kind] = workspace[kind] + self._backward_peaks[kind].bytes_of(runs)
        if self.forward_only:
            one = [
                memory.saved_bytes((kind, KEEP), loads) for kind in range(self.layout.kinds.number)
            ]
            workspace[Kind.FORWARD] += np.ceil(
                self.ends.held_bytes(loads) + self.layout.most_over_stages(one)
            )
        seconds, comm = dict(self._seconds), dict(self._comm)
        offloaded = {kind: count for (kind, mode), count in counts.items() if mode == OFFLOAD}
        if offloaded and not self.forward_only:
            self._add_copies(offloaded, recompute, seconds, comm, workspace)
        return Table(
            seconds=seconds,
            recompute_seconds=recompute,
            comm_seconds=comm,
            link_seconds=self._links,
            link_latency_seconds=self.layout.profile.link_latency_seconds,
            held_bytes={**self._held, Item.ACTIVATIONS: memory.activation_bytes(loads, counts)},
            workspace_bytes=workspace,
            resident_bytes=memory.states_bytes,
        )

    def parts(self) -> "list[ChunkTables]":
        """Return a ChunkTables for each part of joined loads, with values copied from this one."""
        tables, at, document = [], 0, 0
        for loads in self.loads.parts:
            chunks = slice(at, at + loads.chunks)
            documents = slice(document, document + len(loads.lengths))
            at, document = chunks.stop, documents.stop
            part = ChunkTables(
                self.seconds, self.memory, self.ends, loads, self.forward_only, self.kinds
            )
            # Set the values that cached properties would compute.
            vars(part).update(
                {name: _cut(getattr(self, name), chunks) for name in _OF_CHUNKS},
                _held={
                    item: held[:, documents if item in DOCUMENT_ITEMS else chunks]
                    for item, held in self._held.items()
                },
                _backward_peaks={
                    kind: peak.part(chunks) for kind, peak in self._backward_peaks.items()
                },
                _device_backward=self._device_backward[:, chunks],
            )
            tables.append(part)
        return tables

    # --- independent of recompute ----------------------------------------------------------------

    @cached_property
    def _workspace(self) -> dict[Kind, np.ndarray]:
        """Workspaces [stages, chunks] by op kind, without recompute; of_runs replaces that of F."""
        of_layers = {kind: self.memory.workspace_bytes(kind, self.loads) for kind in self.kinds}
        return of_layers | dict(self.ends.head_workspace_bytes(self.loads))

    @cached_property
    def _backward_peaks(self) -> dict[Kind, BackwardPeak]:
        return {kind: BackwardPeak(self.memory, kind, self.loads) for kind in self.backwards}

    @cached_property
    def _seconds(self) -> dict[Kind, np.ndarray]:
        return {kind: self.seconds.of(kind, self.loads) for kind in self._workspace}

    @cached_property
    def _device_backward(self) -> np.ndarray:
        return self.seconds.device(Kind.BACKWARD, self.loads)

    @cached_property
    def _comm(self) -> dict[Kind, np.ndarray]:
        return {kind: self.seconds.communication(kind, self.loads) for kind in self._workspace}

    @cached_property
    def _links(self) -> dict[Payload, np.ndarray]:
        link = self.seconds.link(self.loads)
        head = self.ends.head_link_seconds(self.loads, self.forward_only)
        return {Payload.ACTIVATION: link, Payload.GRADIENT: link, **head}

    @cached_property
    def _held(self) -> dict[Item, np.ndarray]:
        memory, loads = self.memory, self.loads
        return {
            Item.KV: memory.kv_bytes(loads),
            Item.KV_GRADIENTS: memory.kv_gradient_bytes(loads),
            Item.WEIGHT_INPUTS: memory.weight_input_bytes(loads),
            **self.ends.head_held_bytes(loads),
        }

    def _add_copies(
        self,
        offloaded: Mapping[int, np.ndarray],
        recompute: np.ndarray,
        seconds: dict[Kind, np.ndarray],
        comm: dict[Kind, np.ndarray],
        workspace: dict[Kind, np.ndarray],
    ) -> None:
        """Add to every op the copies of ``offloaded`` layers, [stages, chunks] by layer kind."""
        memory, loads = self.memory, self.loads
        copies = sum(count * memory.copy_seconds(loads, kind) for kind, count in offloaded.items())
        in_flight = np.minimum(np.sum(list(offloaded.values()), axis=0), IN_FLIGHT)
        for op in (Kind.FORWARD, *self.backwards):
            work = seconds[op] + (recompute if op in BACKWARDS else 0.0)
            exposed = np.maximum(copies - work, 0.0)
            seconds[op] = seconds[op] + exposed
            comm[op] = comm[op] + exposed
            largest = np.max(
                [
                    np.where(count > 0, memory.offloaded_workspace(op, loads, kind), 0.0)
                    for kind, count in offloaded.items()
                ],
                axis=0,
            )
            workspace[op] = workspace[op] + np.ceil(in_flight * largest)
