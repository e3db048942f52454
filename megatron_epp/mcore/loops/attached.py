"""Makes a loop's model compute slices, where the schedule asks for them and nowhere else.

The model stays usable as it was: only while the schedule runs a chunk are positions and attention
those of the chunk. Generation, evaluation of another kind, another schedule meet Megatron's own.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from megatron.core.utils import unwrap_model

from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.ir import FULL
from megatron_epp.mcore.capabilities.table import limit_for
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.loops.adapter import Adapter
from megatron_epp.mcore.model.attention import Attention, attention_for, this_device
from megatron_epp.planner.calls.call_cost import ActivationBudget

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_HERE = "_megatron_epp_attached"


class AttachedModel:
    """A model that computes slices by ``adapter``; ``slicing`` turns that on and off.

    context      the most tokens of a document
    stores_last_slice   the attention wants K and V of a document's last slice kept
    head_again   of slices whose loss comes later, the head runs again in the backward, so that no
                 logits wait for it
    memory       what slices may hold, for which plans recompute layers in the place of the loop's
                 own flags; None: those are in force
    """

    def __init__(
        self,
        model: "GPTModel",
        adapter: Adapter,
        attention: Attention,
        head_again: bool,
        memory: ActivationBudget | None,
    ):
        self.adapter, self.head_again, self.memory = adapter, head_again, memory
        self._config = model.config
        self.slicing = True
        self.context = model.max_sequence_length
        self._chunk: ChunkParams | None = None
        self._again = False
        self._letters = ""
        self.stores_last_slice = attention.stores_last_slice
        # Here, not above: whole micro-batches run with Megatrons that have no hybrid models.
        from megatron_epp.mcore.model.elastic_layers import install_in_model

        install_in_model(model, self.context, attention)
        for index, layer in enumerate(model.decoder.layers):
            layer.forward = self._whole(layer.forward, index)
        model.forward = self._with_chunk(model.forward)
        if model.post_process:
            model._postprocess = self._head(model._postprocess)
        object.__setattr__(model, _HERE, self)

    @contextmanager
    def computing(self, chunk: ChunkParams, head_again: bool) -> Iterator[None]:
        """The model's forwards in this context compute ``chunk``."""
        self._chunk, self._again = chunk, head_again and self.head_again
        try:
            with self._planned_recompute():
                yield
        finally:
            self._chunk, self._again = None, False

    @contextmanager
    def recomputing(self, letters: str) -> Iterator[None]:
        """The model's forwards in this context compute a whole micro-batch, of which the layers
        with the letter for it are recomputed. Only where there is a ``memory``."""
        self._letters = letters
        try:
            with self._planned_recompute():
                yield
        finally:
            self._letters = ""

    @contextmanager
    def _planned_recompute(self) -> Iterator[None]:
        """The model's own recompute of whole layers is out of force where plans choose it."""
        own = self._config.recompute_granularity
        if self.memory is not None and own == "full":
            self._config.recompute_granularity = None
        try:
            yield
        finally:
            self._config.recompute_granularity = own

    def _whole(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        """A layer's forward, recomputed where a whole micro-batch's letters say so."""

        def whole(hidden_states: Any, **others: Any) -> Any:
            if self._letters[index : index + 1] != FULL or not torch.is_grad_enabled():
                return forward(hidden_states=hidden_states, **others)
            hidden = tensor_parallel.checkpoint(
                lambda x: forward(hidden_states=x, **others)[0],
                bool(self._config.distribute_saved_activations),
                hidden_states,
            )
            return hidden, None

        return whole

    def _with_chunk(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)

        def with_chunk(*args: Any, **named: Any) -> Any:
            chunk = self._chunk
            if chunk is None:
                return forward(*args, **named)
            given = signature.bind_partial(*args, **named).arguments
            assert chunk.positions is not None
            given |= {
                "position_ids": chunk.positions[None],
                "attention_mask": None,
                "packed_seq_params": chunk,
            }
            given.setdefault("input_ids", None)
            return forward(**given)

        return with_chunk

    def _head(self, postprocess: Callable[..., Any]) -> Callable[..., Any]:
        def head(hidden_states: Any, **others: Any) -> Any:
            if not (self._again and torch.is_grad_enabled()):
                return postprocess(hidden_states=hidden_states, **others)
            return tensor_parallel.checkpoint(
                lambda hidden: postprocess(hidden_states=hidden, **others), False, hidden_states
            )

        return head


def attached(model: Any) -> AttachedModel | None:
    """The object attached to the loop's ``model``, wrapped or not; None: none is."""
    (inner,) = unwrap_model([model])
    return getattr(inner, _HERE, None)


def attach_to(
    model_chunks: Any,
    adapter: Adapter,
    attention: str = "auto",
    head_again: bool = True,
    memory_gib: float | None = None,
) -> AttachedModel:
    """Make the loop's model compute slices. ValueError: one line on what cannot."""
    chunks = model_chunks if isinstance(model_chunks, list | tuple) else [model_chunks]
    if len(chunks) != 1:
        raise ValueError(
            f"attach: {len(chunks)} model chunks on a rank; expected one (no interleaved pipeline)"
        )
    for name in ("lengths", "rows", "loss"):
        if not callable(getattr(adapter, name, None)):
            raise ValueError(
                f"attach: the adapter has no function {name!r}; expected lengths, rows and loss "
                "(megatron_epp/mcore/loops/adapter.py)"
            )
    (model,) = unwrap_model(list(chunks))
    if attached(model) is not None:
        raise ValueError("attach: this model is attached already")
    reason = limit_for("slices", model)
    if reason is not None:
        raise ValueError(f"attach: {reason}; whole micro-batches (install_schedule) can be run")
    try:
        chosen = attention_for(attention, model.config, this_device())
    except ValueError as refusal:
        raise ValueError(f"attach: {refusal}") from None
    memory = None
    if memory_gib is not None:
        if not 0 < memory_gib < math.inf:
            raise ValueError(f"attach(memory_gib={memory_gib}): expected more than 0")
        memory = ActivationBudget.of(model.config, model.vocab_size, memory_gib * GIB)
    return AttachedModel(model, adapter, chosen, head_again, memory)
