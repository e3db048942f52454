"""Patches of a loop's model, which computes slices while the schedule of this package runs a chunk.

At all other times, such as in generation or under another schedule, the model uses Megatron's
positions and attention.
"""

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.mcore.capabilities.table import limit_for
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.kinds.modules import kinds_of_layer
from megatron_epp.mcore.kinds.registry import LAYER_KINDS
from megatron_epp.mcore.loops.adapter import Adapter
from megatron_epp.mcore.loops.model_front import ChunkInputs, ReachedError, language_part
from megatron_epp.mcore.model.attention import (
    Attention,
    attention_for,
    choose_mask,
    this_device,
)
from megatron_epp.mcore.model.elastic_layers import install_in_model
from megatron_epp.mcore.patching.releases import ALL_KINDS, installed_version, numbers_of
from megatron_epp.planner.calls.call_cost import ActivationBudget

_HERE = "_megatron_epp_attached"


class AttachedModel:
    """State of a loop's model whose modules were patched to compute slices of documents.

    Attributes:
        adapter: Splits the loop's micro-batches into documents.
        slicing: Whether plans may cut documents; if false, every micro-batch is one chunk.
        part: The module with Megatron's layers, often the model itself.
        context: Maximum number of tokens of a document.
        stores_last_slice: Whether the attention requires that the K and V of a document's last
            slice are stored.
        head_again: Whether backward recomputes the LM head of all chunks of a micro-batch except
            the last, after which the loss is computed. Their logits are then not saved.
        memory: Limit of the activations' bytes. Plans then choose which layers are recomputed. If
            None, the loop's own flags choose the recomputed layers.
        share_from: Minimum number of tokens of a shared prefix; 0 disables sharing.
        within_layers: Whether the layers are computing a chunk, or have failed in it.
        output: Output of the layers for the last chunk; None before the first.
    """

    def __init__(
        self,
        model: Any,
        part: Any,
        adapter: Adapter,
        attention: Attention,
        head_again: bool,
        memory: ActivationBudget | None,
        share_from: int = 0,
    ):
        self.adapter, self.head_again, self.memory = adapter, head_again, memory
        self.share_from = share_from
        self.part, self._config = part, part.config
        self.slicing = True
        self.context = part.max_sequence_length
        self._chunk: ChunkParams | None = None
        self._front: ChunkInputs | None = None
        self._again = self._catching = self.within_layers = False
        self.output: Any = None
        self.stores_last_slice = attention.stores_last_slice
        install_in_model(part, self.context, attention, in_loop=True)
        part.decoder.forward = self._rotated(part.decoder.forward)
        part.forward = self._with_chunk(part.forward)
        if part is not model:
            model.forward = self._past_the_front(model.forward)
        if part.post_process and hasattr(part, "_postprocess"):
            part._postprocess = self._head(part._postprocess)
        object.__setattr__(model, _HERE, self)

    def __str__(self) -> str:
        where = f"{type(self.adapter).__name__} on a {type(self.part).__name__}"
        left_out = "".join(kind.left_out_of_loops(self._config) for kind in LAYER_KINDS)
        return f"slices, megatron-core {installed_version()}, {where}{left_out}"

    @property
    def has_front(self) -> bool:
        """Whether the adapter has a method ``inputs``, for modules that need full documents."""
        return hasattr(self.adapter, "inputs")

    @contextmanager
    def computing(
        self, chunk: ChunkParams, head_again: bool, front: ChunkInputs | None = None
    ) -> Iterator[None]:
        """Make the model's forwards compute ``chunk`` in this context.

        Args:
            chunk: The chunk's parameters for the layers.
            head_again: Whether to recompute the LM head, if ``self.head_again`` is also set.
            front: Inputs of the layers if the modules before them ran on full documents, else None.
        """
        self._chunk, self._front, self.within_layers = chunk, front, False
        self._again = head_again and self.head_again
        try:
            with self._planned_recompute():
                yield
        finally:
            self._chunk, self._front, self._again = None, None, False

    def reached_with(self, model: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run ``model`` on ``inputs`` until it calls :attr:`part`; return the call's arguments.

        Raises:
            ValueError: The forward of ``model`` does not call :attr:`part`.
        """
        self._catching = True
        try:
            model(**inputs)
        except ReachedError as reached:
            return reached.given
        finally:
            self._catching = False
        raise ValueError(
            f"a {type(self.part).__name__} was not reached by the model's forward with the "
            f"adapter's inputs ({', '.join(inputs)}); expected those of a whole document"
        )

    @contextmanager
    def _planned_recompute(self) -> Iterator[None]:
        """Disable the model's own full recompute in this context if plans choose the recompute."""
        own = self._config.recompute_granularity
        if self.memory is not None and own == "full":
            self._config.recompute_granularity = None
        try:
            yield
        finally:
            self._config.recompute_granularity = own

    def _with_chunk(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        signature, part = inspect.signature(forward), self.part
        full_heads = hasattr(part, "_postprocess")

        @wraps(forward)
        def with_chunk(*args: Any, **named: Any) -> Any:
            if self._catching:
                raise ReachedError(_by_name(signature, args, named))
            chunk, front = self._chunk, self._front
            if chunk is None:
                return forward(*args, **named)
            arguments = _by_name(signature, args, named)
            arguments |= {
                "position_ids": self._positions(chunk, front),
                "attention_mask": None,
                "packed_seq_params": chunk,
            }
            if front is not None and front.hidden is not None:
                arguments["decoder_input"] = front.hidden
            arguments.setdefault("input_ids", None)
            if self._recomputes_head and part.post_process and not full_heads:
                arguments["output_processor"] = _recomputed_head
            rotary = self._rotary
            if rotary is not None:
                rotary.computed = chunk
            try:
                return forward(**arguments)
            finally:
                if rotary is not None:
                    rotary.computed = None

        return with_chunk

    @property
    def _rotary(self) -> Any:
        """Module that computes the rotary embedding of a chunk's positions; None without one."""
        rotary = getattr(self.part, "rotary_pos_emb", None)
        return rotary if hasattr(rotary, "computed") else None

    def _rotated(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the decoder's forward with the rotary rows of the chunk's positions.

        Some models pass the table's first rows; the returned forward replaces these rows.
        """
        signature = inspect.signature(forward)

        def rotated(*args: Any, **named: Any) -> Any:
            if self._chunk is None:
                return forward(*args, **named)
            arguments = _by_name(signature, args, named)
            if self._rotary is not None:
                arguments["rotary_pos_emb"] = self._rotary.replaced(arguments.get("rotary_pos_emb"))
            self.within_layers = True
            self.output = forward(**arguments)
            self.within_layers = False
            return self.output

        return rotated

    def _positions(self, chunk: ChunkParams, front: ChunkInputs | None) -> Tensor:
        """Return the positions: [1, t], or [axes, 1, t] for positions with several axes."""
        if self.part.position_embedding_type != "mrope":
            return chunk.positions[None]
        if self._config.apply_rope_fusion:
            boundaries = on_device(chunk.cu_seqlens_q, chunk.positions.device)
            chunk.cu_seqlens_q = chunk.cu_seqlens_kv = boundaries
        if front is not None and front.positions is not None:
            return front.positions
        return chunk.positions.expand(3, 1, -1)  # text: all axes are equal

    def _past_the_front(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a model that contains the language part.

        If the modules before the layers have run on full documents, the returned forward calls
        only the language part.
        """
        signature = inspect.signature(forward)
        known = inspect.signature(self.part.forward).parameters

        def past_the_front(*args: Any, **named: Any) -> Any:
            if self._front is None:
                return forward(*args, **named)
            arguments = _by_name(signature, args, named)
            return self.part(**{name: x for name, x in arguments.items() if name in known})

        return past_the_front

    @property
    def _recomputes_head(self) -> bool:
        return self._again and torch.is_grad_enabled()

    def _head(self, postprocess: Callable[..., Any]) -> Callable[..., Any]:
        def head(hidden_states: Any, **others: Any) -> Any:
            if not (self._recomputes_head and self.part.post_process):
                return postprocess(hidden_states=hidden_states, **others)
            return tensor_parallel.checkpoint(
                lambda hidden: postprocess(hidden_states=hidden, **others), False, hidden_states
            )

        return head


def _by_name(
    signature: inspect.Signature, args: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    arguments = dict(signature.bind_partial(*args, **named).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    return arguments


def _recomputed_head(*, hidden_states: Tensor, **arguments: Any) -> Tensor:
    """Compute the LM head and the loss, recomputed in the backward (an ``output_processor``)."""
    labels, scale = arguments["labels"], arguments["scale_logits"]

    def output(hidden_t1H: Tensor) -> Tensor:
        logits, _ = arguments["output_layer"](
            hidden_t1H,
            weight=arguments["output_weight"],
            runtime_gather_output=arguments["runtime_gather_output"],
        )
        if labels is None:
            result: Tensor = scale(logits).transpose(0, 1).contiguous()
        else:
            result = arguments["compute_language_model_loss"](labels, scale(logits))
        return result

    return tensor_parallel.checkpoint(output, False, hidden_states)


def attached(model: Any) -> AttachedModel | None:
    """Return the :class:`AttachedModel` of ``model``, wrapped or not; None if not attached."""
    (inner,) = unwrap_model([model])
    return getattr(inner, _HERE, None)


def attach_to(
    model_chunks: Any,
    adapter: Adapter,
    attention: str = "auto",
    head_again: bool = True,
    memory_gib: float | None = None,
    share_from: int = 0,
) -> AttachedModel:
    """Patch the loop's model to compute slices of documents.

    Args:
        model_chunks: The model, or a list with only this model.
        adapter: Splits the loop's micro-batches into documents.
        attention: Attention implementation, with the values of --epp-attention.
        head_again: Whether backward recomputes the LM head of all chunks of a micro-batch except
            the last, after which the loss is computed.
        memory_gib: Limit of the activations in GiB; None applies the loop's recompute flags.
        share_from: Minimum number of tokens of a shared prefix; 0 disables sharing.

    Returns:
        The state of the patched model, which is also stored on the model.

    Raises:
        ValueError: The model, its layers or the adapter are not supported, or ``memory_gib`` or
            ``share_from`` is out of range.
    """
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
    alternative = "Megatron's own schedule can run it"
    try:
        part = language_part(model)
    except ValueError as refusal:
        raise ValueError(f"attach: {refusal}; {alternative}") from None
    if part is not model and mpu.get_context_parallel_world_size() > 1:
        raise ValueError(
            f"attach: what stands in front of a {type(model).__name__}'s layers takes its own part "
            f"of a document over context-parallel ranks; {alternative}"
        )
    known = inspect.signature(part.forward).parameters.values()
    if not any(p.name == "packed_seq_params" or p.kind is p.VAR_KEYWORD for p in known):
        raise ValueError(
            f"attach: a {type(part).__name__}'s forward takes no packed_seq_params, from which its "
            f"layers read the slice; {alternative}"
        )
    reason = limit_for("slices", part)
    if reason is not None:
        raise ValueError(f"attach: {reason}")
    version = installed_version()
    if not hasattr(part, "_postprocess") and numbers_of(version) < ALL_KINDS:
        raise ValueError(
            f"attach: a {type(part).__name__} with megatron-core {version}; expected a GPTModel, "
            f"or megatron-core {'.'.join(map(str, ALL_KINDS))} or later; {alternative}"
        )
    try:
        for layer in part.decoder.layers:  # raises for an unknown kind
            kinds_of_layer(layer)
        chosen = attention_for(attention, part.config, this_device())
        choose_mask(chosen, part.config, this_device())
    except ValueError as refusal:
        raise ValueError(f"attach: {refusal}") from None
    if share_from < 0:
        raise ValueError(f"attach(share_from={share_from}): expected 0 (off) or more tokens")
    memory = None
    if memory_gib is not None:
        if not 0 < memory_gib < math.inf:
            raise ValueError(f"attach(memory_gib={memory_gib}): expected more than 0")
        memory = ActivationBudget.of(part.config, part.vocab_size, memory_gib * GIB)
    return AttachedModel(model, part, adapter, chosen, head_again, memory, share_from)


def say(words: str) -> None:
    """Print one line on stderr on rank 0.

    The function does not use logging, because some frameworks (Megatron-Bridge) filter the warnings
    of all loggers. Users must see whether slices run.
    """
    started = dist.is_available() and dist.is_initialized()
    if (dist.get_rank() if started else int(os.environ.get("RANK", "0"))) == 0:
        print(words, file=sys.stderr, flush=True)
