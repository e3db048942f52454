"""The chunk that passes through a layer right now, for those of its modules that are not told.

    layer(hidden, params)      params lead to the chunk's state
      attention(..., params)   told
      mlp(hidden)              not told, and run again in backward, outside of the layer

So the layer notes the state, the MLP takes it along, and gives it back whenever it runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn

from megatron_epp.layers.chunk_state import ChunkState


class CurrentChunk:
    """``state`` of the chunk that passes; None outside of a layer, and where there is no plan."""

    def __init__(self) -> None:
        self.state: ChunkState | None = None

    @contextmanager
    def during(self, state: ChunkState | None) -> Iterator[None]:
        before, self.state = self.state, state
        try:
            yield
        finally:
            self.state = before


def note_in_layer(
    forward: Callable[..., Any],
    current_chunk: CurrentChunk,
    state_of: Callable[[dict[str, Any]], ChunkState | None],
) -> Callable[..., Any]:
    """A layer's ``forward(hidden_states=..., **others)`` with the state that is among ``others``
    noted: also when the whole layer is recomputed."""

    @wraps(forward)
    def wrapped(hidden_states: Tensor, **others: Any) -> Any:
        with current_chunk.during(state_of(others)):
            return forward(hidden_states=hidden_states, **others)

    return wrapped


@contextmanager
def taken_along(mlp: nn.Module, current_chunk: CurrentChunk) -> Iterator[None]:
    """Around the wrapping of ``mlp`` for recompute: what it runs again meets the state of then."""
    original = mlp.forward

    def inner(x: Tensor, *, chunk_state: ChunkState | None, **others: Any) -> Any:
        with current_chunk.during(chunk_state):
            return original(x, **others)

    mlp.forward = inner
    yield
    recomputing = mlp.forward

    @wraps(original)
    def outer(x: Tensor, **others: Any) -> Any:
        return recomputing(x, chunk_state=current_chunk.state, **others)

    mlp.forward = outer
