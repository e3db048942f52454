"""The meter counts exactly the bytes that autograd holds, and those of the store."""

import gc

import pytest
import torch
from torch import nn

from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import AllocatorMeter, SavedBytesMeter

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


def test_what_lies_in_the_stores_buffers_counts_once(store) -> None:
    """Saved or not, as the state that a slice begins with; of memory that is theirs no more as any
    other."""
    meter = SavedBytesMeter([])
    with meter.watch(store):
        store.append(0, 0, 0, torch.ones(4, 1, 5), torch.ones(4, 1, 2))
        held = meter.now
        key = store.context(0, 0, 4)[0]
        y = torch.ones(5, requires_grad=True) * key  # saves it
        assert meter.now == held == 4 * 7 * 4
        store.release(0, 0)
        assert meter.now == 0
        z = torch.ones(5, requires_grad=True) * key
        assert meter.now == 4 * 5 * 4
        del y, z


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


class Allocator:
    """torch.cuda's figures without a GPU."""

    def __init__(self, monkeypatch):
        self.now = self.peak = self.deferred = 0
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self._stats)

        def slow() -> int:
            raise AssertionError("flattens and sorts all figures after every op")

        monkeypatch.setattr(torch.cuda, "max_memory_allocated", slow)

    def _reset(self):
        self.peak = self.now

    def _stats(self):
        allocated = {"current": self.now - self.deferred, "peak": self.peak - self.deferred}
        active = {"current": self.now, "peak": self.peak}
        return {"allocated_bytes": {"all": allocated}, "active_bytes": {"all": active}}

    def op(self, most: int, left: int, deferred: int = 0):
        """An op that holds ``most`` while it runs and leaves ``left``, of which ``deferred`` are
        nobody's any more, but a stream may still use them."""
        self.peak, self.now, self.deferred = max(self.peak, most), left, deferred


def test_the_allocators_peak_of_an_iteration_stays_megatrons_to_report(monkeypatch, store) -> None:
    memory = Allocator(monkeypatch)
    memory.op(1000, 100)
    meter = AllocatorMeter()
    with meter.watch(store):
        memory.op(170, 150)
        assert meter.op_peak() == 70
        memory.op(160, 120)
        assert meter.op_peak() == 70
    assert meter.peak_bytes == 70
    assert memory.peak == 170


def test_records_have_every_ops_own_allocator_peak(monkeypatch, store) -> None:
    memory = Allocator(monkeypatch)
    meter = AllocatorMeter(every_op=True)
    with meter.watch(store):
        memory.op(170, 150)
        assert meter.op_peak() == 170
        memory.op(160, 120)
        assert meter.op_peak() == 160
        memory.op(121, 0)
        assert meter.op_peak() == 121
    assert meter.peak_bytes == 170


def test_messages_that_streams_still_use_are_in_use(monkeypatch, store) -> None:
    memory = Allocator(monkeypatch)
    memory.op(100, 100)
    meter = AllocatorMeter()
    with meter.watch(store):
        memory.op(170, 164, deferred=64)
        assert meter.op_peak() == 70 and meter.now == 64
