"""Wrappers around the forwards of a layer and its modules, to recompute or offload tensors."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch import Tensor, nn

from megatron_epp.ir import FULL, KEEP, OFFLOAD, SELECTIVE
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.recompute.offload import offloading
from megatron_epp.layers.recompute.outputs import DroppedOutputs, recomputable, saving_handle

# checkpoint(function, tensor) -> function(tensor), saving only the tensor for backward
Checkpoint = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]

OF_MLA = "u"  # only in layers with MLA
OF_EXPERTS = "e"  # only in layers with MoE
# Modes whose bytes and seconds are a layer's own.
ON_DEVICE = KEEP + FULL + "".join(mode for mode in SELECTIVE if mode not in (OF_MLA, OF_EXPERTS))
EXECUTABLE = ON_DEVICE + OFFLOAD
MODULES = {mode: frozenset(modules) for mode, modules in SELECTIVE.items()}


def wrap_layer(
    forward: Callable[..., tuple[Tensor, Any]],
    index: int,
    state_of: Callable[[dict[str, Any]], ChunkState | None],
    checkpoint: Checkpoint,
    dropped: DroppedOutputs,
) -> Callable[..., tuple[Tensor, Any]]:
    """Wrap the forward of layer ``index`` of the stage, to recompute or offload it as planned.

    Recompute does not change the K/V store, because the store already has the chunk's K/V.

    Args:
        forward: ``forward(hidden_states=..., **others)`` of the layer.
        index: number of the layer in the stage.
        state_of: function that returns the chunk's state from the keyword arguments; None for a
            forward without a plan.
        checkpoint: function that runs another function and saves only its input.
        dropped: registry of the outputs that the layer drops in forward and recomputes in backward.
            A forward with a selective recompute mode sets its ``modules``.
    """

    @wraps(forward)
    def wrapped(hidden_states: Tensor, **others):
        state = state_of(others)
        if state is None or not state.training:
            return forward(hidden_states=hidden_states, **others)
        choice = state.recompute[state.layer(index)]
        if choice == FULL:
            hidden = checkpoint(
                lambda x: hidden_of(forward(hidden_states=x, **others)), hidden_states
            )
            return hidden, None
        if choice == OFFLOAD:
            around: AbstractContextManager[None] = offloading(state, state.layer(index), others)
        elif choice in MODULES:
            around = dropped.by(MODULES[choice])
        else:
            return forward(hidden_states=hidden_states, **others)
        with around:
            return forward(hidden_states=hidden_states, **others)

    return wrapped


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states of a layer's output; some layers return (hidden states, context)."""
    return output[0] if isinstance(output, tuple) else output


def wrap_norm(norm: nn.Module, dropped: DroppedOutputs):
    """Wrap a norm so that its output is dropped after use if norms are recomputed.

    A norm without weights is not wrapped: it is an identity, because the next linear includes the
    norm or because the layer has no norm.
    """
    if not any(True for _ in norm.parameters()):
        return
    forward = norm.forward

    @wraps(forward)
    def wrapped(x: Tensor) -> Tensor:
        if "layernorm" not in dropped.modules:
            return forward(x)
        output, handle = recomputable(forward, x)
        dropped.add(output, handle)
        return output

    norm.forward = wrapped


def wrap_mlp(mlp: nn.Module, dropped: DroppedOutputs):
    """Wrap an MLP, which returns (output, bias), to save only its input if MLPs are recomputed.

    If the input was also dropped, its recompute handle is saved instead.
    """
    forward = mlp.forward

    @wraps(forward)
    def wrapped(x: Tensor, **others):
        if "mlp" not in dropped.modules:
            return forward(x, **others)
        bias = None

        def run(x: Tensor) -> Tensor:
            nonlocal bias
            with dropped.by(frozenset()):
                output, bias = forward(x, **others)
            return output

        output, _ = saving_handle(x, dropped.take(x), lambda: recomputable(run, x))
        return output, bias

    mlp.forward = wrapped


def wrap_consumer(linear: nn.Module, dropped: DroppedOutputs, last: bool = True):
    """Wrap a linear so that it saves, for an input that was dropped, a handle that recomputes it.

    ``last`` says whether this linear is the last module of the pass that reads the input.
    """
    forward = linear.forward

    @wraps(forward)
    def wrapped(x: Tensor, *args, **others):
        if not dropped.handles:
            return forward(x, *args, **others)
        return saving_handle(x, dropped.take(x, last), lambda: forward(x, *args, **others))

    linear.forward = wrapped
