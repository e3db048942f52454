"""Tensors kept for backward beside autograd's own saving, through the same hooks."""

from typing import Any

import torch
from torch import Tensor


class SavedTensorHooks:
    """The saved-tensor hooks that are in force where this is made.

    A function that keeps tensors by itself, or in a graph of its own under hooks of its own, hands
    them to these: whoever counts or moves what autograd saves then has them all.
    """

    def __init__(self) -> None:
        # The only way to ask; autograd applies the innermost hooks alone (torch 2.11).
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(self, tensor: Tensor) -> Any:
        tensor = tensor.detach()
        return tensor if self._hooks is None else self._hooks[0](tensor)

    def unpack(self, packed: Any) -> Tensor:
        return packed if self._hooks is None else self._hooks[1](packed)
