"""Tensors on the host from F to B: the same values, once each, two layers in flight, never late."""

import gc

import pytest
import torch
from torch import Tensor

from megatron_epp.runtime.host_store import (
    LEAST_BLOCK,
    LEAST_BYTES,
    HostMemory,
    HostStore,
    OffloadedLayer,
)
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import SavedBytesMeter

CPU = torch.device("cpu")
ROWS = 128
SAVED = ROWS * ROWS * 8  # bytes that a layer saves: the result of its tanh


class Late:
    """Copies that happen at the last moment that is allowed: when somebody waits for them. What is
    read before is no number, and what is overwritten before is lost."""

    pinned = False

    def out(self, pairs):
        return list(pairs)

    def back(self, pairs):
        for target, _ in pairs:
            target.fill_(255)
        return list(pairs)

    def wait(self, pairs):
        for target, source in pairs:
            target.copy_(source)
        pairs.clear()


def store(copies=None, meter=None, **changes) -> HostStore:
    made = HostStore(CPU, meter, **changes)
    made._copies = copies or made.copies
    return made


def nobodys(tensor: Tensor) -> bool:
    return False


def forward(host: HostStore, chunk: int, letters: str, x: Tensor, look=lambda: None) -> Tensor:
    """A layer for each letter, of which ``o`` goes to the host; ``look`` after each."""
    for letter in letters:
        if letter == "o":
            with host.layer(chunk, nobodys):
                x = x.tanh()
        else:
            x = x.tanh()
        look()
    host.wait()
    return x


def inputs() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(ROWS, ROWS, dtype=torch.float64, requires_grad=True)


def gradient(letters: str, host: HostStore) -> Tensor:
    """Of two chunks that are in flight together."""
    x = inputs()
    first, second = (forward(host, chunk, letters, x) for chunk in (0, 1))
    for chunk, y in ((1, second), (0, first)):
        host.prefetch(chunk)
        y.square().sum().backward()
    assert len(host) == host.memory.bytes == 0
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("letters", ["o", "oo", "oko", "koook", "ooooo"])
@pytest.mark.parametrize("copies", [None, Late], ids=["at once", "as late as may be"])
def test_gradients_are_those_of_keeping(letters, copies) -> None:
    kept = gradient("k" * len(letters), store())
    assert torch.equal(gradient(letters, store(copies and copies())), kept)


def test_two_layers_at_most_are_on_the_device() -> None:
    """While F runs, and while B runs; none in between."""
    meter = SavedBytesMeter([])
    held: list[int] = []
    with meter.watch(Store({})):
        host, x = store(Late(), meter), inputs()
        y = forward(host, 0, "oooo", x, lambda: held.append(meter.now))
        assert [now / SAVED for now in held] == [1, 2, 2, 2]
        assert meter.now == 0
        assert host.memory.bytes == host.memory.peak_bytes == 4 * SAVED
        held.clear()
        for hooked in _nodes(y):
            hooked.register_prehook(lambda *gradients: held.append(meter.now))
        meter.op_peak()
        host.prefetch(0)
        y.sum().backward()
        # Before each layer's turn: what is behind it is gone, itself on its way.
        assert [now / SAVED for now in held] == [1, 1, 1, 1]
        assert meter.op_peak() == 2 * SAVED
        assert meter.now == host.memory.bytes == 0


def _nodes(y: Tensor):
    node = y.grad_fn
    while node is not None and "Tanh" in node.name():
        yield node
        node = node.next_functions[0][0]


def test_views_of_one_storage_go_once_and_parameters_stay() -> None:
    weight = torch.randn(ROWS, ROWS, dtype=torch.float64, requires_grad=True)
    table = torch.randn(ROWS, ROWS, dtype=torch.float64)
    meter = SavedBytesMeter([weight])
    with meter.watch(Store({})):
        host, x = store(meter=meter, parameters=[weight]), inputs()
        with host.layer(0, lambda tensor: tensor.data_ptr() == table.data_ptr()):
            joined = torch.cat((x, x))
            parts = joined.split(ROWS) + joined.t().split(ROWS, 1)  # four views of one storage
            y = sum((part @ part) @ weight * table for part in parts[:2])
            z = y + parts[2].exp().sum() + parts[3].sin().sum()
        held = meter.now
        host.wait()
        storages = {r().nbytes for r in host._offloaded[0][0]._away}
        assert 2 * SAVED in storages and len(host._offloaded[0][0]._away) < 8
        # What stays is what all layers share; the weight counts nowhere.
        assert held > meter.now == SAVED
        host.prefetch(0)
        z.sum().backward()
        mine = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    joined = torch.cat((x, x))
    parts = joined.split(ROWS) + joined.t().split(ROWS, 1)
    y = sum((part @ part) @ weight * table for part in parts[:2])
    (y + parts[2].exp().sum() + parts[3].sin().sum()).sum().backward()
    assert torch.equal(mine[0], x.grad) and torch.equal(mine[1], weight.grad)


def test_every_kind_of_tensor_comes_back_as_it_was() -> None:
    host = store(Late())
    torch.manual_seed(1)
    base = torch.randn(40, 30)
    saved = [
        base,
        base.t()[3:, ::2],
        base.view(torch.uint8)[5],
        torch.rand(7, 100) > 0.5,
        torch.randn(300, dtype=torch.bfloat16)[1:],
        torch.arange(1000),
    ]
    small = torch.zeros(LEAST_BYTES - 1, dtype=torch.uint8)
    with host.layer(0, nobodys):
        offloaded = _layer_in_force()
        packed = [offloaded.pack(tensor) for tensor in saved]
        assert offloaded.pack(small).data_ptr() == small.data_ptr()
    host.wait()
    before = [tensor.clone() for tensor in saved]
    for tensor in saved:
        tensor.zero_()
    host.prefetch(0)
    for one, mine in zip(before, map(offloaded.unpack, packed), strict=True):
        assert torch.equal(one, mine) and one.dtype == mine.dtype
    for tensor, mine in zip(saved, map(offloaded.unpack, packed), strict=True):
        assert mine.stride() == tensor.stride()


def _layer_in_force() -> OffloadedLayer:
    pack, _ = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return pack.__self__


def test_where_the_host_has_no_room_a_layer_stays(caplog) -> None:
    kept = gradient("kkk", store())
    host = store(memory=HostMemory(SAVED + LEAST_BLOCK))  # of the first layer alone
    assert torch.equal(gradient("oko", host), kept)
    assert host.memory.peak_bytes == SAVED
    (said,) = caplog.messages
    assert "no memory on the host for 0.1 MiB that a layer saved" in said
    assert "--epp-host-memory-gib" in said


def test_where_the_host_gives_no_memory_a_layer_stays(monkeypatch, caplog) -> None:
    """The error of an allocator may have no message."""

    def none_left(*_, **__):
        raise MemoryError

    kept, host = gradient("kkk", store()), store()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", none_left)
        assert torch.equal(gradient("oko", host), kept)
    assert host.memory.peak_bytes == 0
    (said,) = caplog.messages
    assert "0.0 MiB are taken (MemoryError)" in said


def test_a_layer_of_small_tensors_stays_and_is_none_the_less_finished() -> None:
    """What a single row saves on one of many ranks is not worth a copy."""
    host = store(Late())
    x = torch.ones(4, requires_grad=True)
    forward(host, 0, "oo", x).sum().backward()
    assert len(host) == host.memory.peak_bytes == 0
    mixed, y = inputs(), None
    with host.layer(1, nobodys):
        y = mixed.tanh()
    with host.layer(1, nobodys):
        z = y[0, :4].tanh().clone()
    host.wait()
    host.prefetch(1)
    z.sum().backward()
    assert len(host) == host.memory.bytes == 0 < host.memory.peak_bytes


def test_what_was_abandoned_is_forgotten() -> None:
    meter = SavedBytesMeter([])
    with meter.watch(Store({})):
        host, x = store(Late(), meter), inputs()
        y = forward(host, 0, "oo", x)
        with host.layer(1, nobodys):
            z = x.tanh()
        with pytest.raises(MemoryError), host.layer(2, nobodys):
            z = z.tanh()
            raise MemoryError
        host.prefetch(0)
        host.clear()
        assert len(host) == host.memory.bytes == 0
        del y, z
        gc.collect()
        assert meter.now == 0
