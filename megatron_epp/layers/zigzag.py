"""Zigzag order of a sequence over context-parallel ranks, as in Megatron.

2 ranks     0 1 2 3 4 5 6 7      rank 0: 0 1 6 7      rank 1: 2 3 4 5
"""

import torch
from torch import Tensor


def zigzag(rows: int, ranks: int) -> list[Tensor]:
    """Return the row indices [rows / ranks] of each rank in Megatron's zigzag order.

    ``ranks`` is the context-parallel size, and ``rows`` a multiple of 2 x ranks. The rows are
    divided into 2 x ranks equal parts. Rank 0 has the first part and the last part, rank 1 the
    second part and the second-to-last part.
    """
    pieces = torch.arange(rows).chunk(2 * ranks)
    return [torch.cat([pieces[rank], pieces[-1 - rank]]) for rank in range(ranks)]
