"""The cost of any plan on one machine: a profile, laid out over stages and devices.

Where each part stands: :mod:`layout <megatron_epp.cost.layout>` (stages, degrees, kinds of layers,
features of a chunk), :mod:`seconds <megatron_epp.cost.seconds>`, :mod:`memory
<megatron_epp.cost.memory>`, :mod:`output_layer <megatron_epp.cost.output_layer>` (on the last stage
or on all); here they become the table that the simulator plays. Costs by the names of a model and a
device are made in :mod:`megatron_epp.cost.build`.

The sums are InfiniPipe's eqs 1 to 10 with corrections that stand where they are made.

What a layer saved and is offloaded is copied to the host's memory while F runs and back while B or
I runs, a layer at a time, both ways at once:

    seconds[s, c] = max(seconds without copies, offloaded[s, c] * saved_bytes[c] / host rate)

which wants the offloaded layers spread among the others (ir.recompute.offload_among). Two of them
at most are on the device at a time, one in use and one under way, as in Transformer Engine's
CPU offloading: all the op long, since a copy back begins before its layer's turn. What the host's
memory holds is counted apart (cost.host_memory), and a copy that an op has to wait for counts as
communication.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_epp.cost.backward_peak import (
    LayerRun,
    backward_workspace_bytes,
    runs_of_counts,
    runs_of_plan,
)
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.loads import Loads, loads_of_plan, plan_loads
from megatron_epp.cost.memory import ChunkMemory
from megatron_epp.ir import (
    BACKWARDS,
    IN_FLIGHT,
    KEEP,
    OF_LAYERS,
    OFFLOAD,
    Chunk,
    Item,
    Kind,
    Payload,
    Plan,
    Table,
    check_ranks,
)


class Cost(ChunkMemory):
    """Seconds and bytes of chunks on the stages of one replica; fields: :class:`StageLayout`."""

    def with_vocabulary(self, parallel: bool) -> "Cost":
        """With the output layer cut over the stages, or on the last one alone."""
        if parallel == self.vocabulary_parallel:
            return self
        return dataclasses.replace(self, vocabulary_parallel=parallel)

    def loads(self, chunks: Sequence[Chunk], documents: Sequence[int]) -> Loads:
        return plan_loads(chunks, documents, ranks=self.cp)

    def table(self, plan: Plan) -> Table:
        """Seconds and bytes of every op of ``plan``, as the simulator wants them; with the output
        layer where the plan has it."""
        if plan.vocabulary_parallel != self.vocabulary_parallel:
            return self.with_vocabulary(plan.vocabulary_parallel).table(plan)
        check_ranks(plan, self.cp)
        loads = loads_of_plan(plan, self.cp)
        counts = self.kinds.of_plan(plan)
        runs = runs_of_plan(self, plan, loads, counts)
        return self._table(loads, counts, runs, plan.forward_only)

    def table_of(self, loads: Loads, counts: Counts, forward_only: bool = False) -> Table:
        """As :meth:`table`, for planners: ``counts`` [stages, chunks] layers have each choice.

        The layers of each kind of a stage are taken to stand in the order of ``counts``, kept ones
        last; those offloaded stand anywhere.
        """
        return self._table(loads, counts, runs_of_counts(self, loads, counts), forward_only)

    def _table(
        self, loads: Loads, counts: Counts, runs: Sequence[LayerRun], forward_only: bool
    ) -> Table:
        """A plan of forwards only keeps nothing: one layer's activations at a time, and the ends'
        while they run.
        """
        counts = dict(sorted(counts.items()))  # sums come out alike, whoever counted
        recompute = np.zeros((self.stages, loads.chunks))
        for choice, count in counts.items():
            if choice[1] not in (KEEP, OFFLOAD):
                recompute += count * self.recompute_seconds(choice, loads)
        workspace = {kind: self.workspace_bytes(kind, loads) for kind in OF_LAYERS}
        workspace[Kind.FORWARD] = self.forward_workspace_bytes(loads, counts)
        for kind in BACKWARDS:
            workspace[kind] += backward_workspace_bytes(self, kind, loads, runs)
        if forward_only:
            one = [self.saved_bytes((kind, KEEP), loads) for kind in range(self.kinds.number)]
            workspace[Kind.FORWARD] += np.ceil(self.end_bytes(loads) + self.most_over_stages(one))
        workspace |= self.output_layer.head_workspace_bytes(loads)
        seconds = {kind: self.seconds(kind, loads) for kind in workspace}
        comm = {kind: self.comm_seconds(kind, loads) for kind in workspace}
        offloaded = {kind: count for (kind, letter), count in counts.items() if letter == OFFLOAD}
        if offloaded and not forward_only:
            self._add_copies(offloaded, loads, recompute, seconds, comm, workspace)
        link = self.link_seconds(loads)
        links = {
            Payload.ACTIVATION: link,
            Payload.GRADIENT: link,
            **self.output_layer.head_link_seconds(loads, forward_only),
        }
        held_bytes = {
            Item.ACTIVATIONS: self.activation_bytes(loads, counts),
            Item.KV: self.kv_bytes(loads),
            Item.KV_GRADIENTS: self.kv_gradient_bytes(loads),
            Item.WEIGHT_INPUTS: self.weight_input_bytes(loads),
            **self.output_layer.head_held_bytes(loads),
        }
        return Table(
            seconds=seconds,
            recompute_seconds=recompute,
            comm_seconds=comm,
            link_seconds=links,
            link_latency_seconds=self.profile.link_latency_seconds,
            held_bytes=held_bytes,
            workspace_bytes=workspace,
            resident_bytes=self.states_bytes,
        )

    def _add_copies(
        self,
        offloaded: Mapping[int, np.ndarray],
        loads: Loads,
        recompute: np.ndarray,
        seconds: dict[Kind, np.ndarray],
        comm: dict[Kind, np.ndarray],
        workspace: dict[Kind, np.ndarray],
    ) -> None:
        """Add what ``offloaded`` [stages, chunks] layers of each kind take of every op."""
        copies = sum(count * self.copy_seconds(loads, kind) for kind, count in offloaded.items())
        in_flight = np.minimum(np.sum(list(offloaded.values()), axis=0), IN_FLIGHT)
        for op in (Kind.FORWARD, *BACKWARDS):
            work = seconds[op] + (recompute if op in BACKWARDS else 0.0)
            exposed = np.maximum(copies - work, 0.0)
            seconds[op] = seconds[op] + exposed
            comm[op] = comm[op] + exposed
            largest = np.max(
                [
                    np.where(count > 0, self.offloaded_workspace(op, loads, kind), 0.0)
                    for kind, count in offloaded.items()
                ],
                axis=0,
            )
            workspace[op] = workspace[op] + np.ceil(in_flight * largest)
