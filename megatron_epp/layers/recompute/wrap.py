"""Forwards of a layer and its modules, wrapped: they keep, recompute or offload as planned."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

from torch import Tensor, nn

from megatron_epp.ir import FULL, KEEP, OFFLOAD, SELECTIVE
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.recompute.offload import offloading
from megatron_epp.layers.recompute.outputs import DroppedOutputs, recomputable, saving_handle

# checkpoint(function, tensor) -> function(tensor), saving only the tensor for backward
Checkpoint = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]

OF_MLA = "u"  # of layers with latent attention alone
OF_EXPERTS = "e"  # of layers with experts alone
# Choices whose bytes and seconds are a layer's own.
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
    """``forward(hidden_states=..., **others)`` of layer ``index`` of the stage, recomputed or
    offloaded where the chunk's state says so. ``state_of`` finds the state among the keyword
    arguments; ``dropped`` is what the layer's wrapped modules read.

    The recomputation meets the chunk's K and V in the store, where they stay as they are.
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
        offloaded: AbstractContextManager[None] = nullcontext()
        if state is not None and choice == OFFLOAD:
            offloaded = offloading(state, state.layer(index), others)
        with offloaded, dropped.by(MODULES.get(choice, frozenset())):
            return forward(hidden_states=hidden_states, **others)

    return wrapped


def hidden_of(output: Any) -> Tensor:
    """A layer's hidden states, which some give beside a context."""
    return output[0] if isinstance(output, tuple) else output


def wrap_norm(norm: nn.Module, dropped: DroppedOutputs):
    """Where layer norms are recomputed: their output is dropped once it is used. Not of one without
    weights: a linear has it inside, or there is none."""
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
    """Where the MLP is recomputed: only its input is kept, or not even that."""
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
    """A linear that would save what a module in front of it has dropped; ``last``: the last one
    that reads it."""
    forward = linear.forward

    @wraps(forward)
    def wrapped(x: Tensor, *args, **others):
        return saving_handle(x, dropped.take(x, last), lambda: forward(x, *args, **others))

    linear.forward = wrapped
