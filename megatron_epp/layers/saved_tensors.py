"""Saved-tensor hooks for tensors that autograd itself does not save."""

from typing import Any

import torch
from torch import Tensor


class SavedTensorHooks:
    """Saved-tensor hooks that are active when this object is created.

    A function that saves tensors without autograd, or in a graph with other hooks, passes the
    tensors through these hooks. Meters and offloading then see all saved tensors.

    Attributes:
        active: whether there are hooks.
    """

    def __init__(self) -> None:
        # No public API; autograd applies only the innermost hooks (torch 2.11).
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.active = self._hooks is not None

    def pack(self, tensor: Tensor) -> Any:
        """Return the pack hook's result for the detached ``tensor``; without hooks, the tensor."""
        tensor = tensor.detach()
        return tensor if self._hooks is None else self._hooks[0](tensor)

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor for ``packed``, a result of :meth:`pack`."""
        return packed if self._hooks is None else self._hooks[1](packed)
