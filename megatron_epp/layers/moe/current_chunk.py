"""The chunk that a layer runs now, for modules of the layer without access to the chunk's state.

    layer(hidden, params)      params lead to the chunk's state
      attention(..., params)   has access to the state
      mlp(hidden)              has no access, and is recomputed in backward, outside of the layer

The layer sets the state. The wrapped MLP remembers the state of its forward, and sets this state
again in recompute.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn

from megatron_epp.layers.chunk_state import ChunkState


class CurrentChunk:
    """Holder of the running chunk's ``state``, which is None outside layers or without a plan."""

    def __init__(self) -> None:
        self.state: ChunkState | None = None

    @contextmanager
    def during(self, state: ChunkState | None) -> Iterator[None]:
        """Set ``state`` within the context; restore the earlier state at its end."""
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
    """Wrap a layer's ``forward`` so that it sets ``current_chunk`` to the state of its chunk.

    ``state_of`` returns the state from the keyword arguments of ``forward``. The state is also set
    when the full layer is recomputed.
    """

    @wraps(forward)
    def wrapped(hidden_states: Tensor, **others: Any) -> Any:
        with current_chunk.during(state_of(others)):
            return forward(hidden_states=hidden_states, **others)

    return wrapped


@contextmanager
def taken_along(mlp: nn.Module, current_chunk: CurrentChunk) -> Iterator[None]:
    """Make recompute of ``mlp`` use its forward's state; wrap ``mlp`` within this context."""
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
