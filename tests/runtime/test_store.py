"""The store of K and V: one buffer per layer and cut document, no copies, exact bytes."""

import pytest
import torch

from megatron_epp.runtime.kv_store import Store

GROUPS, SIZE = 2, 4


def tokens(count: int, value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count, GROUPS, SIZE), value, dtype=dtype)


def store() -> Store:
    """Documents 0 and 5 are cut; later slices attend to 10 and 3 of their inputs."""
    return Store({0: 10, 5: 3})


def test_slices_are_written_into_one_buffer() -> None:
    kept = store()
    kept.append(1, 0, 0, tokens(6, 1), tokens(6, 2))
    key, value = kept.context(1, 0, 6)
    kept.append(1, 0, 6, tokens(4, 3), tokens(4, 4))
    whole_key, whole_value = kept.context(1, 0, 10)
    assert whole_key.data_ptr() == key.data_ptr() and whole_value.data_ptr() == value.data_ptr()
    assert whole_key[:, 0, 0].tolist() == [1.0] * 6 + [3.0] * 4
    assert whole_value[:, 0, 0].tolist() == [2.0] * 6 + [4.0] * 4
    assert kept.context(1, 0, 10, 6)[0].shape == (4, GROUPS, SIZE)


def test_buffers_can_have_room_for_the_last_slice() -> None:
    kept = Store({0: 6}, {0: 10})
    kept.append(1, 0, 0, tokens(6, 1), tokens(6, 2))
    before = kept.bytes
    kept.append(1, 0, 6, tokens(4, 3), tokens(4, 4))
    assert kept.bytes == before == 2 * tokens(10).nbytes
    assert kept.context(1, 0, 10)[0][:, 0, 0].tolist() == [1.0] * 6 + [3.0] * 4
    # Nobody attends to the last slice later, so its K and V are left no gradients.
    ((_, _, key),) = kept
    assert len(key) == 6
    kept.add_gradient(1, 0, tokens(6, 5), tokens(6, 6))
    assert kept.gradient(1, 0, 0, 6)[1].unique().tolist() == [6.0]
    kept.release(1, 0)
    assert kept.bytes == 0


def test_a_recomputed_layer_writes_nothing() -> None:
    kept = store()
    kept.append(0, 0, 0, tokens(6, 1), tokens(6, 1))
    kept.append(0, 0, 6, tokens(4, 1), tokens(4, 1))
    before = kept.bytes
    kept.append(0, 0, 0, tokens(6, 9), tokens(6, 9))
    kept.append(0, 0, 6, tokens(4, 9), tokens(4, 9))
    assert kept.bytes == before
    assert kept.context(0, 0, 10)[0].unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("dtype", "sum_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_gradients_add_up_in_float32_at_least(dtype, sum_dtype) -> None:
    kept = store()
    kept.append(0, 0, 0, tokens(6, 1, dtype), tokens(6, 1, dtype))
    kept.append(0, 0, 6, tokens(4, 1, dtype), tokens(4, 1, dtype))
    last = tokens(10, 256, dtype)
    kept.add_gradient(0, 0, last, last)
    last.zero_()  # the store has its own copy
    kept.add_gradient(0, 0, tokens(6, 1, dtype), tokens(6, 2, dtype))
    key_grad, value_grad = kept.gradient(0, 0, 4, 8)
    assert key_grad.dtype == sum_dtype
    # 257 is no bfloat16: a sum in bfloat16 would have stayed at 256.
    assert key_grad[:, 0, 0].tolist() == [257, 257, 256, 256]
    assert value_grad[:, 0, 0].tolist() == [258, 258, 256, 256]


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


def test_clearing_frees_everything() -> None:
    kept = store()
    kept.append(0, 0, 0, tokens(2), tokens(2))
    kept.clear()
    assert (len(kept), kept.bytes) == (0, 0)


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
