"""Recompute chosen per chunk, stage and layer: a layer's forward, wrapped."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from megatron_epp.ir import FULL, KEEP
from megatron_epp.layers.chunk import ChunkState

# checkpoint(function, tensor) -> function(tensor), saving only the tensor for backward
Checkpoint = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]

EXECUTABLE = KEEP + FULL


def wrap_layer(
    forward: Callable[..., tuple[Tensor, Any]],
    index: int,
    state_of: Callable[[dict[str, Any]], ChunkState | None],
    checkpoint: Checkpoint,
) -> Callable[..., tuple[Tensor, Any]]:
    """``forward(hidden_states=..., **others)`` of layer ``index`` of the stage, recomputed where
    the chunk's state says so. ``state_of`` finds the state among the keyword arguments.

    The recomputation meets the chunk's K and V in the store, where they stay as they are.
    """

    @wraps(forward)
    def wrapped(hidden_states: Tensor, **others):
        state = state_of(others)
        if state is None or not state.training or state.recompute[index] == KEEP:
            return forward(hidden_states=hidden_states, **others)
        hidden = checkpoint(lambda x: forward(hidden_states=x, **others)[0], hidden_states)
        return hidden, None

    return wrapped
