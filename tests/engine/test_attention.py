"""What Transformer Engine's attention holds between forward and backward, and where it is called.

In float64, with emulated kernels.
"""

import weakref
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron_epp.layers.attention.te import MASK, TOP_LEFT_MASK, TransformerEngineKernel
from megatron_epp.layers.attention.te_direct import LAYOUT
from megatron_epp.layers.attention.varlen import CuSeqlens, Operands
from megatron_epp.mcore.patching import emulated_engine
from tests.layers.runner import HEAD_SIZE, SCALE, documents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not emulated_engine.is_wanted(), reason="kernels of GPUs have no float64"),
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


def passes(kernel, call, grad) -> list[Tensor]:
    out, kept = kernel.forward(call, True)
    return [out, *kernel.backward(grad, call, kept)]


@pytest.mark.parametrize("buckets", [False, True], ids=["lengths", "lengths in buckets"])
@pytest.mark.parametrize(("before", "sinks"), [(None, False), (4, False), (4, True)])
def test_calls_that_are_alike_are_the_modules_to_the_last_bit(
    engine, monkeypatch, before, sinks, buckets
) -> None:
    """The kernel is called alone, of other tensors and other lengths within the bucket."""
    version = (9, 24, 0) if buckets else (9, 23, 9)
    monkeypatch.setattr("transformer_engine.pytorch.utils.get_cudnn_version", lambda: version)
    seen, attend = [], engine.DotProductAttention.forward
    monkeypatch.setattr(
        engine.DotProductAttention,
        "forward",
        lambda *args, **named: (seen.append(named["cu_seqlens_q"]), attend(*args, **named))[1],
    )

    def fresh() -> TransformerEngineKernel:
        plain = TransformerEngineKernel(HEADS, GROUPS, HEAD_SIZE, SCALE)
        return plain.of_layers(before, sinks) if before is not None else plain

    def drawn(lengths, keys):
        q, k, v, grad = documents((sum(lengths),), HEADS, GROUPS, torch.bfloat16)[0]
        longer = [x.repeat(2, 1, 1)[: sum(keys)].contiguous() for x in (k, v)]
        offsets = torch.linspace(-1, 1, HEADS, dtype=torch.bfloat16) if sinks else None
        device = torch.device("cpu")
        return Operands(q, *longer, CuSeqlens.of(lengths, keys, device), offsets), grad

    kernel = fresh()
    passes(kernel, *drawn([9], [13]))
    assert len(seen) == 1 and len(seen[0]) == (33 if buckets else 2)
    for lengths, keys in (([9], [13]), ([12], [16]), ([10], [15])):
        call, grad = drawn(lengths, keys)
        direct = passes(kernel, call, grad)
        inference = kernel.forward(call, False)[0]
        calls = len(seen)
        assert all(map(torch.equal, direct, passes(fresh(), call, grad)))
        assert torch.equal(inference, direct[0])
        assert len(seen) == calls + 1
    assert len(seen) == 5  # of them one was the first without a backward
    call, grad = drawn([9], [13])
    wide = [None if x is None else x.double() for x in (*call.tensors, None)][:4]
    exact = Operands(*wide[:3], call.cu_seqlens, wide[3])
    found, again = (passes(kernel, exact, grad.double()) for _ in range(2))
    assert all(map(torch.equal, found, again)) and len(seen) == 6  # another format is another call
    passes(kernel, *drawn([9, 5, 3], [9, 5, 3]))  # another bucket
    assert len(seen) == 7


def test_a_module_that_hands_over_more_is_called_every_time(engine, monkeypatch) -> None:
    from transformer_engine.pytorch.attention.dot_product_attention import backends

    ran, attend = [], engine.DotProductAttention.forward
    monkeypatch.setattr(
        engine.DotProductAttention,
        "forward",
        lambda *args, **named: (ran.append(1), attend(*args, **named))[1],
    )
    fused = backends.fused_attn_fwd
    monkeypatch.setattr(
        backends, "fused_attn_fwd", lambda *args, rng_gen=None, **named: fused(*args, **named)
    )
    kernel = TransformerEngineKernel(HEADS, GROUPS, HEAD_SIZE, SCALE)
    q, k, v, grad = documents((9,), HEADS, GROUPS, torch.bfloat16)[0]
    call = Operands(q, k, v, CuSeqlens.of([9], [9], torch.device("cpu")))
    for _ in range(3):
        passes(kernel, call, grad)
    assert len(ran) == 3 and kernel.refused == 1


def test_calls_without_context_have_a_mask_of_their_own_and_equal_results(monkeypatch) -> None:
    """Whole documents and first slices; not slices after a context, windows or sinks."""
    from transformer_engine.pytorch.attention.dot_product_attention import backends

    masks: list[str] = []
    for name in ("fused_attn_fwd", "fused_attn_bwd"):
        fused = getattr(backends, name)

        @wraps(fused)
        def noted(*args, fused=fused, **named):
            arguments = signature(fused).bind(*args, **named).arguments
            masks.append(arguments["attn_mask_type"])
            return fused(*args, **named)

        monkeypatch.setattr(backends, name, noted)
    one, two = (TransformerEngineKernel(HEADS, GROUPS, HEAD_SIZE, SCALE) for _ in range(2))
    two.use_top_left(True)
    device = torch.device("cpu")
    calls = {(9,): (9,), (5, 1, 3): (5, 1, 3), (4,): (9,), (1,): (9,), (2, 3): (2, 7)}
    for queries, keys in calls.items():
        q, _, _, grad = documents((sum(queries),), HEADS, GROUPS, torch.bfloat16)[0]
        _, k, v, _ = documents((9,), HEADS, GROUPS, torch.bfloat16)[0]
        call = Operands(q, k[: sum(keys)], v[: sum(keys)], CuSeqlens.of(queries, keys, device))
        for _ in range(2):  # recorded, then directly
            masks.clear()
            found, expected = passes(two, call, grad), passes(one, call, grad)
            assert all(map(torch.equal, found, expected))
            without = queries == keys
            assert call.has_context is not without
            assert masks == [TOP_LEFT_MASK if without else MASK] * 2 + [MASK] * 2
    assert not two.refused and two.of_layers(4, False).without_context is None
    two.use_top_left(False)
    masks.clear()
    passes(two, Operands(q[:1], k[:1], v[:1], CuSeqlens.of([1], [1], device)), grad[:1])
    assert masks == [MASK] * 2


@pytest.mark.parametrize("top_left", [False, True])
def test_the_script_of_masks_calls_as_the_module_does(top_left) -> None:
    """What scripts/gpu/attention_masks.py times is what training runs."""
    from scripts.gpu.attention_masks import Packed

    mask = TOP_LEFT_MASK if top_left else MASK
    kernel = TransformerEngineKernel(HEADS, GROUPS, HEAD_SIZE, SCALE, mask=mask)
    q, k, v, grad = documents((9,), HEADS, GROUPS, torch.bfloat16)[0]
    call = Operands(q, k, v, CuSeqlens.of([9], [9], torch.device("cpu")))
    passes(kernel, call, grad)
    (recorded,) = kernel._calls.values()
    ours = Packed("", mask, SCALE).arguments(call, mask) | {"is_training": True}
    ours |= {"do_format": "thd", "dqkv_layout": LAYOUT}
    both = recorded.forward, recorded.backward
    for arguments, takes in zip(both, kernel._fused.signatures.values(), strict=True):
        given = {name: taken.default for name, taken in takes.parameters.items()} | ours
        assert arguments == {name: given[name] for name in arguments}
        assert len(arguments) > 8


@pytest.mark.parametrize("first", ["forward", "backward"])
def test_a_call_of_rows_inside_of_a_chunk_is_recorded(first) -> None:
    """Whether the forward's rows lay there or, as of a tail, the backward's keys alone."""
    kernel = TransformerEngineKernel(HEADS, GROUPS, HEAD_SIZE, SCALE)
    q, k, v, grad = documents((9,), HEADS, GROUPS, torch.bfloat16)[0]
    cu_seqlens = CuSeqlens.of([9], [9], torch.device("cpu"))
    at_start = Operands(q, k, v, cu_seqlens)
    inside = Operands(*(torch.cat((x, x))[9:] for x in (q, k, v)), cu_seqlens)
    calls = (inside, at_start) if first == "forward" else (at_start, inside)
    out, kept = kernel.forward(calls[0], True)
    recorded = [out, *kernel.backward(grad, calls[1], kept)]
    out, kept = kernel.forward(inside, True)
    assert isinstance(kept, tuple) and not kernel.refused
    assert all(map(torch.equal, recorded, [out, *kernel.backward(grad, inside, kept)]))
