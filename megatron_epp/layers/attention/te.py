"""Attention by Transformer Engine's DotProductAttention, the fastest kernels on supported GPUs.

For slices, these points matter; most mistakes raise no error (checked in version 2.20):

- The mask is ``padding_causal_bottom_right``. ``padding_causal`` with fewer queries than keys is
  aligned at the top left. Without context the two masks are equal, but with
  ``padding_causal_bottom_right`` the backward also computes the masked tiles, about half of all
  tiles. Calls without context can therefore have a kernel of their own
  (:meth:`TransformerEngineKernel.use_top_left`).
- Queries, keys and values start at the beginning of their storage. The module infers their layout
  from pointers and offsets, and refuses or misreads a view into the middle of a buffer.
- The module's context parallelism is off, because it does not support this mask. Instead, rows are
  exchanged for heads before and after the module (layers/attention/ulysses.py).
- A window is aligned like the mask. The module has sinks as a parameter; here each call sets the
  module's sinks to those of the call's layer.

The module's autograd saves q, k and v, which this package already saves or caches. A hook therefore
drops these tensors and supplies them in backward. Other saved tensors go through the saved-tensor
hooks that the caller has set.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.attention.te_direct import (
    FusedFunctions,
    KernelCalls,
    alike,
    own_arguments,
)
from megatron_epp.layers.attention.varlen import CuSeqlens, Operands
from megatron_epp.layers.saved_tensors import SavedTensorHooks

MASK, TOP_LEFT_MASK = "padding_causal_bottom_right", "padding_causal"
DIRECT = True  # whether equal calls skip the module's choice of a kernel
# From this cuDNN version on, a graph is built per number of documents. For older versions
# Transformer Engine itself rounds it up to 32, 64, 128, ...
COUNTS_DOCUMENTS, DOCUMENTS = (9, 24), 32


class TransformerEngineKernel:
    """:class:`~megatron_epp.layers.attention.varlen.Kernel` for float16 and bfloat16 on CUDA.

    Args:
        heads: number of query heads of a call.
        groups: number of key heads of a call.
        head_size: head size, or (head size of keys, head size of values).
        scale: scale of the logits.
        around: function that returns a context manager; each call of the module runs in a new one.
        before: number of earlier tokens that a query sees (window); None for all.
        sinks: whether the layers have sinks.
        mask: Transformer Engine's name of the causal mask.

    Attributes:
        without_context: kernel of calls without context; None if this kernel computes them.

    Raises:
        ImportError: if Transformer Engine is not installed.
        OSError: if Transformer Engine cannot be loaded.
        TypeError: if this version of Transformer Engine does not support sinks.
    """

    name = "te"

    def __init__(
        self,
        heads: int,
        groups: int,
        head_size: int | tuple[int, int],
        scale: float,
        around: Callable[[], AbstractContextManager] = nullcontext,
        before: int | None = None,
        sinks: bool = False,
        mask: str = MASK,
    ):
        self._around = around
        self._arguments = heads, groups, head_size, scale, around
        self.without_context: TransformerEngineKernel | None = None
        self._of_layers: dict[tuple[int | None, bool], TransformerEngineKernel] = {}
        import transformer_engine.pytorch as te

        try:
            from transformer_engine.pytorch.attention.dot_product_attention import (
                dot_product_attention as module,
            )

            self._chosen = lambda: module._attention_backends
        except (ImportError, AttributeError):  # other versions keep it elsewhere
            self._chosen = dict
        self._fused: FusedFunctions | None = None
        try:
            from transformer_engine.pytorch.attention.dot_product_attention import backends

            self._fused = FusedFunctions(backends)
        except (ImportError, AttributeError):
            pass
        self._calls: dict[tuple[Any, ...], KernelCalls] = {}
        self._counts_documents = _cudnn_version() >= COUNTS_DOCUMENTS
        others: dict[str, Any] = {} if before is None else {"window_size": (before, 0)}
        others |= {"softmax_type": "learnable"} if sinks else {}
        self._attend = te.DotProductAttention(
            num_attention_heads=heads,
            kv_channels=head_size,
            num_gqa_groups=groups,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type=mask,
            softmax_scale=scale,
            **others,
        )
        if sinks:
            del self._attend.softmax_offset

    def of_layers(self, before: int | None, sinks: bool) -> "TransformerEngineKernel":
        """Return the kernel of layers with a window or sinks; equal layers share a kernel."""
        like = before, sinks
        if like not in self._of_layers:
            self._of_layers[like] = TransformerEngineKernel(*self._arguments, *like)
        return self._of_layers[like]

    def use_top_left(self, wanted: bool) -> None:
        """Set whether calls without context use the mask ``TOP_LEFT_MASK``.

        Calls of layers with a window or sinks always use ``MASK``.
        """
        self.without_context = (
            TransformerEngineKernel(*self._arguments, mask=TOP_LEFT_MASK) if wanted else None
        )

    @property
    def refused(self) -> int:
        """Number of kinds of calls (:func:`alike`) that are never made directly."""
        others = [*self._of_layers.values(), self.without_context]
        of_others = sum(kernel.refused for kernel in others if kernel is not None)
        return of_others + sum(calls.refused for calls in self._calls.values())

    def forward(self, call: Operands, backward: bool) -> tuple[Tensor, Any]:
        """Return the output [T, H, D] and the state for :meth:`backward`, without the operands."""
        if self.without_context is not None and not call.has_context:
            return self.without_context.forward(call, backward)
        if self._counts_documents:
            call = _bucketed(call)
        calls = self._calls.get(key := alike(call, backward))
        if calls is None:
            calls = self._calls[key] = KernelCalls()
        if DIRECT and calls.forward is not None and (calls.backward is not None or not backward):
            return self._forward_directly(calls, call, backward)
        call = _at_start(call)
        if not DIRECT or self._fused is None or calls.refused:
            return self._forward(call, backward)
        recorded: list[dict[str, Any]] = []
        with self._fused.recorded(0, recorded):
            output, kept = self._forward(call, backward)
        calls.forward = calls.others(recorded, call)
        return output, kept

    def backward(self, grad_THD: Tensor, call: Operands, kept: Any) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, and of the sinks if there are any."""
        if self.without_context is not None and not call.has_context:
            return self.without_context.backward(grad_THD, call, kept)
        if self._counts_documents:
            call = _bucketed(call)
        calls = self._calls[alike(call, True)]
        if not isinstance(kept, _Run):
            return self._backward_directly(calls, grad_THD, call, *kept)
        call = _at_start(call)
        nothing_new = calls.forward is None or calls.backward is not None
        if not DIRECT or self._fused is None or nothing_new:
            return kept.gradients(grad_THD, call.tensors)
        recorded: list[dict[str, Any]] = []
        with self._fused.recorded(1, recorded):
            gradients = kept.gradients(grad_THD, call.tensors)
        calls.backward = calls.others(recorded, call)
        return gradients

    def _forward_directly(
        self, calls: KernelCalls, call: Operands, backward: bool
    ) -> tuple[Tensor, Any]:
        assert self._fused is not None and calls.forward is not None
        own = own_arguments(call)
        if call.sinks_H is not None and calls.sinks is not None:
            shape, dtype = calls.sinks
            own["softmax_offset"] = call.sinks_H.reshape(shape).to(dtype)
        # Without torch.no_grad(): the fused functions record no graph.
        output_THD, needed, *_ = self._fused.module.fused_attn_fwd(**calls.forward, **own)
        # Detached: the output is the result of an autograd function that holds ``kept``.
        return output_THD, (output_THD.detach(), *needed) if backward else None

    def _backward_directly(
        self,
        calls: KernelCalls,
        grad_THD: Tensor,
        call: Operands,
        output_THD: Tensor,
        *needed: Tensor,
    ) -> tuple[Tensor, ...]:
        assert self._fused is not None and calls.backward is not None
        own = own_arguments(call) | {"o": output_THD, "d_o": grad_THD.contiguous()}
        own["aux_ctx_tensors"] = list(needed)
        *qkv, _, of_sinks = _five(self._fused.module.fused_attn_bwd(**calls.backward, **own))
        if call.sinks_H is None:
            return tuple(qkv)
        assert of_sinks is not None, "the kernel gives the gradient of its sinks"
        return *qkv, of_sinks.reshape(call.sinks_H.shape).to(call.sinks_H.dtype)

    def _forward(self, call: Operands, backward: bool) -> tuple[Tensor, Any]:
        if not backward:
            with torch.no_grad():
                return _by_heads(self._run(call.tensors, call.cu_seqlens), call), None
        sources = _Sources(call.tensors)
        hooks = torch.autograd.graph.saved_tensors_hooks(sources.pack, sources.unpack)
        with torch.enable_grad(), hooks:
            output = self._run(sources.now, call.cu_seqlens)
        return _by_heads(output.detach(), call), _Run(output, sources)

    def _run(self, inputs: Sequence[Tensor], cu_seqlens: CuSeqlens) -> Tensor:
        """Return the module's output [T, H D].

        All lengths are passed, because the module would synchronise to compute missing lengths.

        Raises:
            RuntimeError: if the module chose the unfused kernel, which holds all scores of a call.
        """
        q, k, v, *sinks = inputs
        if sinks:
            self._attend.softmax_offset = sinks[0]
        with self._around():
            output = self._attend(
                q,
                k,
                v,
                cu_seqlens_q=cu_seqlens.queries,
                cu_seqlens_kv=cu_seqlens.keys,
                max_seqlen_q=cu_seqlens.most_queries,
                max_seqlen_kv=cu_seqlens.most_keys,
            )
        if sinks:
            self._attend.softmax_offset = None
        if self._chosen().get("use_unfused_attention"):
            raise RuntimeError(
                "Transformer Engine finds no fused attention for these calls "
                "(NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 says why)"
            )
        return output


def bucket(count: int, least: int = DOCUMENTS) -> int:
    """Return the smallest number ``least`` x 2^n (n >= 0) that is at least ``count``."""
    while least < count:
        least *= 2
    return least


def _bucketed(call: Operands) -> Operands:
    """Return ``call`` with empty documents appended until their number is a :func:`bucket`."""
    documents = bucket(len(call.cu_seqlens.queries) - 1)
    return replace(call, cu_seqlens=call.cu_seqlens.padded(documents))


def _cudnn_version() -> tuple[int, ...]:
    try:
        from transformer_engine.pytorch.utils import get_cudnn_version
    except ImportError:  # other versions keep it elsewhere
        return (0,)
    return tuple(get_cudnn_version())


def _five(gradients: Sequence[Tensor | None]) -> list[Any]:
    """Return the gradients of q, k, v, of a bias and of the sinks; the last two may be None."""
    return [*gradients, None, None][:5]


def _by_heads(output: Tensor, call: Operands) -> Tensor:
    """Return ``output`` as [T, H, D], where D is the head size of values."""
    return output.view(*call.q_THD.shape[:2], call.v_SGD.shape[2])


def _at_start(call: Operands) -> Operands:
    """Return ``call``; an operand is copied unless it starts at the beginning of its storage."""
    q, k, v, *sinks = (x if x.storage_offset() == 0 else x.clone() for x in call.tensors)
    return Operands(q, k, v, call.cu_seqlens, *sinks)


class _Source(torch.autograd.Function):
    """Root of an autograd graph, which unlike a leaf holds no reference to the input tensor."""

    @staticmethod
    def forward(ctx: Any, nothing: Tensor, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        raise AssertionError("the gradient is taken where it arrives")


class _Sources:
    """Input tensors of one call; the call's graph saves their indices instead of the tensors.

    The graph's hooks hold this object, so this object may refer only to the graph's roots. Python's
    garbage collector cannot see a cycle through autograd nodes. With a cycle, a graph would leak if
    its backward never runs, as after an out-of-memory error.
    """

    def __init__(self, inputs: Sequence[Tensor]):
        with torch.enable_grad():
            nothing = inputs[0].new_empty(0, requires_grad=True)
            self.now: list[Tensor] = [_Source.apply(nothing, x) for x in inputs]
        self._places = {x.data_ptr(): index for index, x in enumerate(self.now)}
        self._shapes = [x.shape for x in self.now]
        self._hooks = SavedTensorHooks()  # made before the graph's own hooks

    def pack(self, tensor: Tensor) -> Any:
        """Return the index of an input tensor; pass other tensors to the caller's hooks."""
        index = self._places.get(tensor.data_ptr())
        is_input = index is not None and tensor.shape == self._shapes[index]
        return index if is_input else self._hooks.pack(tensor)

    def unpack(self, packed: Any) -> Tensor:
        return self.now[packed] if isinstance(packed, int) else self._hooks.unpack(packed)


class _Run:
    """Autograd graph of one module call, reached from ``output``; it holds no input tensors."""

    def __init__(self, output: Tensor, sources: _Sources):
        self._output: Tensor | None = output
        self._sources = sources
        self._edges = [torch.autograd.graph.get_gradient_edge(x) for x in sources.now]
        sources.now = []

    def gradients(self, grad_THD: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v and any sinks; a second call is an error."""
        output, self._output = self._output, None
        assert output is not None, "a call's backward ran twice"
        self._sources.now = list(inputs)
        try:
            return torch.autograd.grad(output, self._edges, grad_THD.reshape(output.shape))
        finally:
            self._sources.now, self._edges = [], []
