"""What lies in the host's memory beside what stays. Gradients of layers that offload: certificates;
their bytes here and there: tests/mcore/test_ledger.py."""

import gc
import weakref

import numpy
import pytest
import torch

from megatron_epp.layers.recompute.offload import entrance
from megatron_epp.runtime.host_store import HostStore
from megatron_epp.runtime.kv_store import Store

ROWS, HIDDEN, HEADS = 48, 16, 4


def test_kept_keys_and_values_stay_where_they_are() -> None:
    store = Store({0: ROWS})
    key = torch.randn(ROWS, HEADS, 8)
    store.append(3, 0, 0, key, key)
    (kept, _), other = store.context(3, 0, ROWS), key
    assert store.holds(3, kept[4:7]) and not store.holds(3, other)
    assert not store.holds(2, kept)


@pytest.mark.parametrize("lets_go", [True, False])
def test_what_was_received_is_not_held_for_its_gradient(lets_go) -> None:
    """With a leaf of its own; were what was received the leaf, a stage would hold it until B."""
    array = numpy.random.default_rng(1).random((ROWS, 1, HIDDEN))
    alive, expected = weakref.ref(array), 2 * torch.from_numpy(array.copy())
    received = torch.from_numpy(array)
    leaf, hidden = entrance(received) if lets_go else (received.requires_grad_(),) * 2
    assert leaf.shape == received.shape
    host = HostStore(torch.device("cpu"))
    with host.layer(0, lambda tensor: False):
        out = hidden.square()
    host.wait()
    del array, received, hidden
    gc.collect()
    assert (alive() is None) == lets_go
    host.prefetch(0)
    out.sum().backward()
    assert torch.equal(leaf.grad, expected) and leaf.grad.is_contiguous()
