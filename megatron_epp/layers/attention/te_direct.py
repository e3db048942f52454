"""Transformer Engine's fused attention, called again as its module called it.

DotProductAttention takes a third of a layer's Python calls to choose a kernel, and chooses the same
one for calls that are alike. What it hands to the fused kernel, forward and backward, is recorded
once; later calls hand over the same with their own tensors and lengths. Nothing is recorded where
it hands over a tensor that is not one of the call's.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.attention.varlen import Operands

LAYOUT = "thd_thd_thd"  # queries, keys and values apart, so each may lie anywhere
_OF_OUTPUT = ("o", "d_o", "aux_ctx_tensors")  # what a backward gets of its forward and after it


@dataclass(slots=True)
class KernelCalls:
    """The fused kernel's arguments for calls that are alike, once they are recorded.

    forward, backward  by name, but for the call's own; None: not recorded
    refused            the module does something that a call with these arguments does not do
    sinks              shape and number format in which the kernel gets them
    """

    forward: dict[str, Any] | None = None
    backward: dict[str, Any] | None = None
    refused: bool = False
    sinks: tuple[tuple[int, ...], torch.dtype] | None = None

    def others(self, recorded: list[dict[str, Any]], call: Operands) -> dict[str, Any] | None:
        """Return the arguments of the one ``recorded`` call beside those of ``call``.

        None, and :attr:`refused`: a call with these alone would not be the module's.
        """
        arguments = recorded[0] if len(recorded) == 1 else {}
        same = [_same(arguments.pop(name, None), x) for name, x in own_arguments(call).items()]
        for name in _OF_OUTPUT:
            arguments.pop(name, None)
        if (sinks := arguments.pop("softmax_offset", None)) is not None:
            self.sinks = tuple(sinks.shape), sinks.dtype
        usual = arguments.get("qkv_layout") == LAYOUT and arguments.get("dropout") == 0.0
        if all(same) and usual and not any(isinstance(x, Tensor) for x in arguments.values()):
            return arguments
        self.refused, self.forward = True, None
        return None


@dataclass(slots=True)
class FusedFunctions:
    """``fused_attn_fwd`` and ``fused_attn_bwd`` of ``module``, where they are looked up."""

    module: ModuleType
    names: tuple[str, str] = ("fused_attn_fwd", "fused_attn_bwd")
    signatures: dict[str, inspect.Signature] = field(default_factory=dict)

    def __post_init__(self):
        """Raise AttributeError where ``module`` has no such functions."""
        for name in self.names:
            self.signatures[name] = inspect.signature(getattr(self.module, name))

    def forward(self, **arguments: Any) -> Any:
        """Return the output, what a backward needs, and more."""
        return getattr(self.module, self.names[0])(**arguments)

    def backward(self, **arguments: Any) -> Any:
        """Return the gradients of q, k and v, and those of a bias and of sinks, if any."""
        return getattr(self.module, self.names[1])(**arguments)

    @contextmanager
    def recorded(self, which: int, calls: list[dict[str, Any]]) -> Iterator[None]:
        """Append the arguments of every forward (0) or backward (1) inside the context."""
        name = self.names[which]
        original: Callable[..., Any] = getattr(self.module, name)

        def record(*arguments: Any, **named: Any) -> Any:
            calls.append(dict(self.signatures[name].bind(*arguments, **named).arguments))
            return original(*arguments, **named)

        setattr(self.module, name, record)
        try:
            yield
        finally:
            setattr(self.module, name, original)


def own_arguments(call: Operands) -> dict[str, Any]:
    """Return what the fused kernel gets of ``call``, forward and backward."""
    lengths = call.cu_seqlens
    return {
        "q": call.q_THD,
        "k": call.k_SGD,
        "v": call.v_SGD,
        "cu_seqlens_q": lengths.queries,
        "cu_seqlens_kv": lengths.keys,
        "cu_seqlens_q_padded": lengths.queries,
        "cu_seqlens_kv_padded": lengths.keys,
        "max_seqlen_q": lengths.most_queries,
        "max_seqlen_kv": lengths.most_keys,
    }


def _same(recorded: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor):
        return bool(recorded == expected)
    if type(recorded) not in (Tensor, torch.nn.Parameter):
        return False
    where, shape = recorded.data_ptr(), recorded.shape
    return where == expected.data_ptr() and shape == expected.shape


def alike(call: Operands, backward: bool) -> tuple[Any, ...]:
    """Return a key of calls for which the module chooses alike.

    They have one number format, and documents and lengths of the same power of two.
    """
    lengths = call.cu_seqlens
    most = lengths.most_queries, lengths.most_keys
    documents = (len(lengths.queries) - 2).bit_length()
    return (
        call.q_THD.dtype,
        backward,
        documents,
        most[0] == most[1],
        *((size - 1).bit_length() for size in most),
    )
