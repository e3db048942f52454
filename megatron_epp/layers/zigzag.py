"""Rows of a sequence that each context-parallel rank has, as Megatron and its frameworks cut them.

2 ranks     0 1 2 3 4 5 6 7      rank 0: 0 1 6 7      rank 1: 2 3 4 5
"""

import torch
from torch import Tensor


def zigzag(rows: int, ranks: int) -> list[Tensor]:
    """Rows of a sequence that each context-parallel rank has: of 2 x ranks equal parts the first
    and the last, the second and the last but one, ..."""
    pieces = torch.arange(rows).chunk(2 * ranks)
    return [torch.cat([pieces[rank], pieces[-1 - rank]]) for rank in range(ranks)]
