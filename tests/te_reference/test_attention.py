"""What Transformer Engine's attention holds between forward and backward, and where it is called.

In float64, over the reference of its kernels.
"""

import weakref
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron_epp.layers.attention.te import TransformerEngineKernel
from megatron_epp.layers.attention.varlen import CuSeqlens, Operands
from megatron_epp.te_reference import reference_switch
from tests.layers.runner import HEAD_SIZE, SCALE, documents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not reference_switch.is_wanted(), reason="kernels of GPUs have no float64"),
]
HEADS, GROUPS = 4, 2


@pytest.fixture(scope="module", autouse=True)
def engine() -> ModuleType:
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    import transformer_engine.pytorch as te

    return te


def holders(tensor: Tensor) -> int:
    """How many tensors share its memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def test_transformer_engine_holds_no_keys_between_forward_and_backward() -> None:
    kernel = TransformerEngineKernel(HEADS, GROUPS, HEAD_SIZE, SCALE)
    (q, k, v, grad) = documents((9,), HEADS, GROUPS, torch.float64)[0]
    cu_seqlens = CuSeqlens.of([9], [9], torch.device("cpu"))
    before = [holders(x) for x in (q, k, v)]
    call = Operands(q, k, v, cu_seqlens)
    out, kept = kernel.forward(call, True)
    assert [holders(x) for x in (q, k, v)] == before
    assert holders(out) > holders(out.clone())  # which the graph does hold
    expected = kernel.backward(grad, call, kernel.forward(call, True)[1])
    copies = Operands(*(x.clone() for x in (q, k, v)), cu_seqlens)
    for tensor in (q, k, v):
        tensor.fill_(torch.nan)  # whoever kept a view would see it
    found = kernel.backward(grad, copies, kept)
    assert all(map(torch.equal, found, expected))
    assert kernel.forward(copies, False)[1] is None


@pytest.mark.parametrize("runs_backward", [True, False])
def test_a_call_whose_backward_never_comes_is_freed(runs_backward) -> None:
    """After memory ran out there is no backward; what every layer holds must go at once."""
    kernel = TransformerEngineKernel(HEADS, GROUPS, HEAD_SIZE, SCALE)
    (q, k, v, grad) = documents((9,), HEADS, GROUPS, torch.float64)[0]
    call = Operands(q, k, v, CuSeqlens.of([9], [9], torch.device("cpu")))
    out, kept = kernel.forward(call, True)
    # The last is held by the graph's hooks: it goes with the graph.
    watched = [weakref.ref(x) for x in (kept, kept._output, kept._sources)]
    if runs_backward:
        kernel.backward(grad, call, kept)
    del out, kept
    assert [ref() for ref in watched] == [None] * 3


def test_kernels_are_chosen_inside_the_context_that_was_given(engine, monkeypatch) -> None:
    open_now: list[bool] = []

    @contextmanager
    def around():
        open_now.append(True)
        yield
        open_now.pop()

    kernel = TransformerEngineKernel(HEADS, GROUPS, HEAD_SIZE, SCALE, around)
    seen = []
    attend = engine.DotProductAttention.forward
    monkeypatch.setattr(
        engine.DotProductAttention,
        "forward",
        lambda *args, **named: (seen.append(list(open_now)), attend(*args, **named))[1],
    )
    (q, k, v, grad) = documents((9,), HEADS, GROUPS, torch.float64)[0]
    call = Operands(q, k, v, CuSeqlens.of([9], [9], torch.device("cpu")))
    kernel.forward(call, False)
    kernel.backward(grad, call, kernel.forward(call, True)[1])
    assert seen == [[True], [True]]
    assert not open_now
