"""The meter counts exactly the bytes that autograd holds, and those of the store."""

import gc

import pytest
import torch
from torch import nn

from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import NoMeter, SavedBytesMeter

ROWS, WIDTH = 32, 8
ACTIVATION = ROWS * WIDTH * 4


@pytest.fixture
def store() -> Store:
    return Store({0: 4})


def test_a_saved_tensor_counts_until_its_graph_is_gone(store) -> None:
    meter = SavedBytesMeter([])
    with meter.watch(store):
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        y = x.exp()  # saves its result
        assert meter.now == ACTIVATION
        z = y.sin()  # saves y, which is counted
        assert meter.now == ACTIVATION
        w = z.exp()
        assert meter.now == 2 * ACTIVATION
        w.sum().backward()
        assert meter.now == 0
    assert meter.op_peak() == meter.peak_bytes == 2 * ACTIVATION


def test_views_count_their_storage_once(store) -> None:
    meter = SavedBytesMeter([])
    with meter.watch(store):
        x = torch.ones(ROWS, WIDTH, requires_grad=True).clone()
        outs = [part.sin() for part in x.split(8)]  # each saves a view of x
        assert meter.now == ACTIVATION
        del outs
        gc.collect()
        assert meter.now == 0


def test_parameters_do_not_count(store) -> None:
    linear = nn.Linear(WIDTH, 3, bias=False)
    meter = SavedBytesMeter(linear.parameters())
    with meter.watch(store):
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        y = linear(x)  # saves x and the weight
        assert meter.now == ACTIVATION
        del y
    assert meter.now == 0
    seeing = SavedBytesMeter([])
    with seeing.watch(store):
        y = linear(x)
        assert seeing.now == ACTIVATION + 3 * WIDTH * 4
        del y


def test_the_stores_buffers_count(store) -> None:
    meter = SavedBytesMeter([])
    with meter.watch(store):
        kv = torch.ones(4, 2, 8)
        store.append(0, 0, 0, kv, kv)
        assert meter.now == store.bytes == 2 * kv.nbytes
        assert meter.op_peak() == 2 * kv.nbytes
        store.release(0, 0)
        assert meter.now == 0
        # What it held when the op began.
        assert meter.op_peak() == 2 * kv.nbytes
        assert meter.op_peak() == 0
    assert meter.peak_bytes == 2 * kv.nbytes


def test_every_op_has_a_peak_of_its_own(store) -> None:
    meter = SavedBytesMeter([])
    with meter.watch(store):
        first = torch.ones(ROWS, WIDTH, requires_grad=True).exp()
        assert meter.op_peak() == ACTIVATION
        second = torch.ones(2 * ROWS, WIDTH, requires_grad=True).exp()
        assert meter.op_peak() == 3 * ACTIVATION
        del first
        gc.collect()
        assert meter.op_peak() == 3 * ACTIVATION
        assert meter.op_peak() == 2 * ACTIVATION
        del second
    assert meter.peak_bytes == 3 * ACTIVATION


def test_nothing_measured_costs_nothing(store) -> None:
    meter = NoMeter()
    with meter.watch(store):
        assert meter.op_peak() == meter.peak_bytes == 0
