"""The store of K and V: exact bytes of one buffer per layer and cut document, and our own bugs."""

import pytest
import torch

from megatron_epp.runtime.kv_store import Store

GROUPS, SIZE = 2, 4


def tokens(count: int, value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count, GROUPS, SIZE), value, dtype=dtype)


def store() -> Store:
    """Documents 0 and 5 are cut; later slices attend to 10 and 3 of their inputs."""
    return Store({0: 10, 5: 3})


def test_bytes_are_those_of_the_buffers() -> None:
    kept = store()
    assert kept.bytes == 0
    kept.append(0, 0, 0, tokens(2, dtype=torch.bfloat16), tokens(2, dtype=torch.bfloat16))
    keys_and_values = 2 * 10 * GROUPS * SIZE * 2
    assert kept.bytes == keys_and_values  # the whole context at once
    kept.append(1, 5, 0, tokens(3), tokens(3))
    assert kept.bytes == keys_and_values + 2 * 3 * GROUPS * SIZE * 4
    kept.append(0, 0, 2, tokens(8, dtype=torch.bfloat16), tokens(8, dtype=torch.bfloat16))
    gradient = tokens(10, dtype=torch.bfloat16)
    kept.add_gradient(0, 0, gradient, gradient)
    peak = keys_and_values + 2 * 3 * GROUPS * SIZE * 4 + 2 * 10 * GROUPS * SIZE * 4
    assert kept.bytes == kept.peak_bytes == peak
    assert len(kept) == 2
    kept.release(0, 0)
    assert kept.bytes == 2 * 3 * GROUPS * SIZE * 4
    kept.release(1, 5)
    assert (kept.bytes, len(kept), kept.peak_bytes) == (0, 0, peak)


def test_what_is_our_own_bug() -> None:
    kept = store()
    with pytest.raises(AssertionError, match="layer 0: document 0 begins at 6"):
        kept.append(0, 0, 6, tokens(4), tokens(4))
    kept.append(0, 0, 0, tokens(6), tokens(6))
    with pytest.raises(AssertionError, match="document 0: 6 kept, 8 wanted"):
        kept.context(0, 0, 8)
    with pytest.raises(AssertionError, match="document 0: 6 kept, 7 appended"):
        kept.append(0, 0, 7, tokens(3), tokens(3))
    with pytest.raises(AssertionError, match="the last slice's backward comes first"):
        kept.add_gradient(0, 0, tokens(6), tokens(6))
    with pytest.raises(KeyError):
        kept.release(0, 5)
