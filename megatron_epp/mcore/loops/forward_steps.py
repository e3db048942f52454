"""Forward steps of a loop on chunks: the rows that they draw, their outputs, and their errors."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.ir import Plan, Span
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.mcore.loops.adapter import rows_of, side_by_side
from megatron_epp.mcore.loops.attached import AttachedModel
from megatron_epp.mcore.loops.call_arguments import LoopCall
from megatron_epp.mcore.loops.microbatch_iterators import MicroBatches, SingleValue
from megatron_epp.mcore.loops.model_front import EncodedDocuments
from megatron_epp.runtime.memory_meter import out_of_memory


class ForwardSteps:
    """Runs of the loop's forward step on the chunks of a plan.

    If replicas run in lockstep, each waits for the others in the expert layers of every op. If the
    loop's own code fails before or after the layers, this class therefore runs the layers without
    that code. ``error`` is then the first error, and all outputs are invalid.

    Args:
        call: The call.
        batches: Micro-batches of the call.
        attached: State of the patched model.
        plan: The plan. It numbers the documents of the whole call.
        forests: Documents of every micro-batch; every node is a document of the plan.
        row_shard: This rank's shard of a chunk's rows.
        tp_group: Tensor-parallel group.
        in_lockstep: Whether replicas run in lockstep.
    """

    def __init__(
        self,
        call: LoopCall,
        batches: MicroBatches,
        attached: AttachedModel,
        plan: Plan,
        forests: Sequence[PrefixForest],
        row_shard: RowShard,
        tp_group: Any,
        in_lockstep: bool,
    ):
        self.model, self.batches, self.attached, self.plan = call.one_model, batches, attached, plan
        self.row_shard, self.in_lockstep = row_shard, in_lockstep
        self.error: Exception | None = None
        self._nodes = [(number, n) for number, forest in enumerate(forests) for n in forest.nodes]
        self._step = call.forward_step_func
        if (sliced := getattr(attached.adapter, "sliced", None)) is not None:
            self._step = sliced(self._step, self.model)
        self._padding: Mapping[str, Tensor | None] = {}
        if batches.readable and not all(chunk.spans for chunk in plan.chunks):
            self._padding = self._rows(Span(0, 0, 1))  # any valid row
        self.front: EncodedDocuments | None = None
        if attached.has_front:
            training = not plan.forward_only
            self.front = EncodedDocuments(
                self._encode, plan.documents, row_shard, tp_group, training
            )

    def output(self, chunk: int, params: ChunkParams, later: bool) -> Any:
        """Return the output of the loop's forward step for a chunk.

        After an ``error``, return an invalid output of the layers instead.

        Args:
            chunk: Number of the chunk.
            params: Parameters of the chunk for the layers.
            later: Whether the loss of the chunk's micro-batch is computed after a later chunk.
        """
        front, attached = None, self.attached
        attached.output = output = None
        if self.error is None:
            with self.going_on():
                if self.front is not None:
                    front = self.front.inputs(chunk, params.state.rows, params.state.tokens)
                with attached.computing(params, later, front):
                    output, _ = self._step(self._drawn(chunk), self.model)
        if self.error is None:
            return output
        if attached.output is None:  # the error came before the layers
            with attached.computing(params, later):
                attached.part(torch.zeros_like(params.positions)[None], None, None)
        return attached.output

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Set ``error`` instead of raising an error of the loop's own code in lockstep."""
        try:
            yield
        except Exception as error:
            if not self.in_lockstep or self.attached.within_layers or out_of_memory(error):
                raise
            self.error = self.error or error

    def _drawn(self, chunk: int) -> Any:
        """Return an iterator over the chunk's rows; ``source`` if this rank cannot read it."""
        if not self.batches.readable:
            return self.batches.source
        parts = [self._rows(span) for span in self.plan.chunks[chunk].spans]
        total = self.row_shard.rows(self.plan.chunks[chunk])
        local = self.row_shard.local(total)
        joined = side_by_side(parts or [self._padding], total)
        return SingleValue({name: None if x is None else x[:, local] for name, x in joined.items()})

    def _rows(self, span: Span) -> Mapping[str, Tensor | None]:
        number, node = self._nodes[span.document]
        where = node.sequence, node.start + span.start, node.start + span.stop
        return rows_of(self.attached.adapter, self.batches.item(number), number, *where)

    def _encode(self, document: int) -> Mapping[str, Any]:
        """Return the arguments of the language part's forward for a full document."""
        if not self.batches.readable:
            raise ValueError(
                "a rank has no data iterator; expected one on every rank, as each runs what stands "
                "before the model's layers"
            )
        number, node = self._nodes[document]
        batch, adapter = self.batches.item(number), self.attached.adapter
        inputs = adapter.inputs(batch, node.sequence)  # type: ignore[attr-defined]
        return self.attached.reached_with(self.model, inputs)
