"""Concatenation of tensors, without a copy if there is only one tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor


def concatenated(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return ``torch.cat`` of the parts, or the part itself if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)
