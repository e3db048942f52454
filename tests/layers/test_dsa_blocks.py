"""Rows of a block of sparse attention."""

from types import SimpleNamespace

import pytest

from megatron_epp.ir import Span
from megatron_epp.layers import dsa
from megatron_epp.layers.chunk_state import Rows


@pytest.mark.parametrize(("on_gpu", "most"), [(False, 1024), (True, 128)])
def test_a_gpu_takes_eight_times_as_many_rows_at_once(on_gpu, most) -> None:
    """Of a chunk of 8K tokens behind 24K, 64 heads: each block is 30 to 40 launches."""
    rows = Rows(0, 8192, Span(0, 24_576, 32_768), True, True)
    q = SimpleNamespace(shape=(8192, 64, 576), is_cuda=on_gpu)
    indexer = SimpleNamespace(shape=(8192, 64, 128))
    how = dsa.Sparse(scale=1.0, most=2048, values=512)
    blocks = list(dsa._blocks(rows, (range(32_768),), q, indexer, how))
    assert len(blocks) == most
    assert blocks[0].rows.start == 0 and blocks[-1].rows.stop == 8192
    assert blocks[0].first == 24_576
