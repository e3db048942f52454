"""Layers whose saved tensors lie in the host's memory: gradients of keeping, and nothing left."""

import gc
import weakref

import numpy
import pytest
import torch
from torch import Tensor, nn

from megatron_epp.ir import Span
from megatron_epp.layers.attention.reference import ReferenceKernel
from megatron_epp.layers.attention.varlen import Operands, VarlenAttention
from megatron_epp.layers.chunk_state import ChunkState, Rows
from megatron_epp.layers.recompute.offload import entrance
from megatron_epp.layers.recompute.outputs import DroppedOutputs
from megatron_epp.layers.recompute.wrap import wrap_layer
from megatron_epp.runtime.host_store import HostStore
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import SavedBytesMeter

ROWS, HIDDEN, HEADS = 48, 16, 4
DTYPE = torch.float64


class Layer(nn.Module):
    """Rotated queries, attention and a linear: something of every kind that a layer saves.

    The rotary table is given to every layer; K lies in the store where the document goes on.
    """

    def __init__(self, attention: VarlenAttention, index: int):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False, dtype=DTYPE)
        self.out = nn.Linear(HIDDEN, HIDDEN, dtype=DTYPE)
        self.attention, self.index = attention, index

    def forward(self, hidden_states: Tensor, table: Tensor, state: ChunkState):
        q, k, v = self.qkv(hidden_states).view(ROWS, 3, HEADS, -1).unbind(1)
        attended, _ = self.attention(q * table, k * table, v, state, self.index, False)
        return hidden_states + self.out(attended.flatten(1)).tanh(), None


class Keeping(ReferenceKernel):
    """Keeps of its forward what kernels do: the output, which is no input of its backward here."""

    def forward(self, call: Operands, backward: bool):
        out_THD, _ = super().forward(call, backward)
        return out_THD, (out_THD.detach(),) if backward else None

    def backward(self, grad_THD: Tensor, call: Operands, kept):
        (out_THD,) = kept
        with torch.no_grad():
            again = self._attend(*call.tensors, call.cu_seqlens)
        assert torch.equal(out_THD, again), "what came back is not what was kept"
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return super().backward(grad_THD, call, None)


def layers(count: int) -> list[Layer]:
    torch.manual_seed(5)
    made = [Layer(VarlenAttention(Keeping(0.5)), index) for index in range(count)]
    for index, layer in enumerate(made):
        layer.forward = wrap_layer(
            layer.forward,
            index,
            lambda others: others["state"],
            lambda f, x: f(x),
            DroppedOutputs(),
        )
    return made


def run(letters: str, cut: bool) -> tuple[dict[str, int], list[Tensor]]:
    """Device and host bytes behind F, and the gradients; ``cut``: the document goes on."""
    made = layers(len(letters))
    parameters = [p for layer in made for p in layer.parameters()]
    store = Store({0: ROWS}, {0: 2 * ROWS})
    meter = SavedBytesMeter(parameters)
    table = torch.rand(ROWS, HEADS, HIDDEN // HEADS, dtype=DTYPE)
    hidden = torch.randn(ROWS, HIDDEN, dtype=DTYPE, requires_grad=True)
    rows = Rows(0, ROWS, Span(0, 0, ROWS), cut, last=not cut)
    with meter.watch(store):
        host = HostStore(torch.device("cpu"), meter, parameters)
        state = ChunkState(0, (rows,), ROWS, letters, store, host=host)
        x = hidden
        for layer in made:
            x, _ = layer(hidden_states=x, table=table, state=state)
        host.wait()
        held = {"device": meter.saved_bytes, "host": host.bytes, "table": table.nbytes}
        for layer in range(len(letters) * cut):
            zeros = torch.zeros(ROWS, HEADS, HIDDEN // HEADS, dtype=DTYPE)
            store.add_gradient(layer, 0, zeros, zeros)
        host.prefetch(0)
        x.square().sum().backward()
        assert meter.saved_bytes == host.bytes == len(host) == len(store) == 0
    return held, [hidden.grad, *(p.grad for p in parameters)]


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "slice"])
@pytest.mark.parametrize("letters", ["o", "oo", "oko", "koo", "ooooo"])
def test_gradients_are_those_of_keeping_and_nothing_stays(letters, cut) -> None:
    kept, expected = run("k" * len(letters), cut)
    held, found = run(letters, cut)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert kept["host"] == 0 < held["host"]
    if "k" not in letters:
        # The table is no layer's own: it stays, once.
        assert held["device"] == held["table"]


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
