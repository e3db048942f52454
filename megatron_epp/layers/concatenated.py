"""Parts one behind the other, without a copy where there is one."""

from collections.abc import Sequence

import torch
from torch import Tensor


def concatenated(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """``torch.cat``, which copies a single part, too."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)
