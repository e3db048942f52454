"""Direct calls of Transformer Engine's fused attention with recorded arguments.

DotProductAttention spends a third of a layer's Python calls on the choice of a kernel, and chooses
the same kernel for calls that are :func:`alike`. The arguments that it passes to the fused kernel,
forward and backward, are recorded once. Later calls pass the recorded arguments, with their own
tensors and lengths. Nothing is recorded if another argument is a tensor, if there is dropout, or if
the layout is not ``LAYOUT``.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.attention.varlen import Operands

LAYOUT = "thd_thd_thd"  # separate queries, keys and values, so each may be anywhere
# what a backward gets from its forward and from the loss
_OF_OUTPUT = ("o", "d_o", "aux_ctx_tensors")


@dataclass(slots=True)
class KernelCalls:
    """Recorded arguments of the fused kernel for calls that are :func:`alike`.

    Attributes:
        forward: arguments of the forward by name, without :func:`own_arguments`; None if they are
            not recorded.
        backward: arguments of the backward; None if they are not recorded.
        refused: whether direct calls are ruled out, because their results could be wrong.
        sinks: shape and dtype in which the kernel gets the sinks; None without sinks.
    """

    forward: dict[str, Any] | None = None
    backward: dict[str, Any] | None = None
    refused: bool = False
    sinks: tuple[tuple[int, ...], torch.dtype] | None = None

    def others(self, recorded: list[dict[str, Any]], call: Operands) -> dict[str, Any] | None:
        """Return the arguments of the only call in ``recorded``, without :func:`own_arguments`.

        If a direct call would not be equivalent, set :attr:`refused` and return None.
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
    """Functions ``fused_attn_fwd`` and ``fused_attn_bwd`` of ``module``."""

    module: Any
    names: tuple[str, str] = ("fused_attn_fwd", "fused_attn_bwd")
    signatures: dict[str, inspect.Signature] = field(default_factory=dict)

    def __post_init__(self):
        for name in self.names:
            self.signatures[name] = inspect.signature(getattr(self.module, name))

    @contextmanager
    def recorded(self, which: int, calls: list[dict[str, Any]]) -> Iterator[None]:
        """Append arguments of forwards (``which`` 0) or backwards (1) to ``calls`` in a context."""
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
    """Return the tensors and lengths of ``call``, by their names in the fused functions."""
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
    """Return a dictionary key; DotProductAttention chooses the same kernel for equal keys.

    The key contains the dtype and ``backward``. It also contains the powers of two to which the
    number of documents, the longest query length and the longest key length round up, and whether
    these two lengths are equal.

    Args:
        call: the call.
        backward: whether a backward follows.
    """
    return call.q_THD.dtype, backward, call.cu_seqlens.powers
