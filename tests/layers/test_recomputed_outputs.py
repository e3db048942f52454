"""Dropped outputs are made again: same gradients, fewer bytes from forward to backward."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megatron_epp.ir import Span
from megatron_epp.layers.attention.cpu import ChunkAttention
from megatron_epp.layers.chunk_state import ChunkState, Rows
from megatron_epp.layers.recompute.outputs import (
    AttentionRecompute,
    DroppedOutputs,
    recomputable_all,
    saving_handles,
)
from megatron_epp.layers.recompute.wrap import (
    MODULES,
    wrap_consumer,
    wrap_layer,
    wrap_mlp,
    wrap_norm,
)
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import SavedBytesMeter

ROWS, HIDDEN, FFN = 24, 8, 32
BYTES = 8  # float64


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_fc1 = nn.Linear(HIDDEN, FFN, bias=False)
        self.linear_fc2 = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None):
        return self.linear_fc2(self.linear_fc1(x).sigmoid()), None


class Layer(nn.Module):
    """Norm, linear, norm, MLP: as much of Megatron's layer as recompute touches, but attention."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN) for _ in range(2)])
        self.linear = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp = Mlp()
        self.mlp_runs = 0

    def forward(self, hidden_states: Tensor, state: ChunkState | None = None):
        x = hidden_states + self.linear(self.norms[0](hidden_states)).tanh()
        return x + self.mlp(self.norms[1](x))[0], None


def layer() -> Layer:
    torch.manual_seed(1)
    made = Layer().double()
    dropped = DroppedOutputs()
    made.forward = wrap_layer(
        made.forward, 0, lambda others: others.get("state"), lambda f, x: f(x), dropped
    )
    for norm in made.norms:
        wrap_norm(norm, dropped)
    for linear in (made.linear, made.mlp.linear_fc1):
        wrap_consumer(linear, dropped)
    wrap_mlp(made.mlp, dropped)
    return made


def held_bytes(letter: str) -> int:
    """From forward to backward. Nothing outlives backward, and no cycle has to be collected."""
    made, store = layer(), Store({})
    state = ChunkState(0, (), ROWS, letter, store)
    hidden = torch.linspace(-1, 1, ROWS * HIDDEN, dtype=torch.float64).view(ROWS, HIDDEN)
    hidden.requires_grad_()
    meter = SavedBytesMeter(made.parameters())
    gc.disable()
    try:
        with meter.watch(store):
            out, _ = made(hidden_states=hidden, state=state)
            held = meter.now
            out.square().sum().backward()
            assert meter.now == 0
    finally:
        gc.enable()
    return held


def test_bytes_are_those_of_what_is_left() -> None:
    """Gradients are those of keeping: certificates, which draw every letter."""
    freed = {letter: held_bytes("k") - held_bytes(letter) for letter in MODULES}
    norm = ROWS * HIDDEN * BYTES  # a norm's output, which a linear saves
    statistics = 2 * ROWS * BYTES  # a norm's mean and deviation, dropped with it
    assert freed["n"] == 2 * (norm + statistics)
    assert freed["m"] == ROWS * FFN * BYTES  # sigmoid's output, which fc2 saves, too
    # Beside the norms, not even the MLP's input is kept.
    assert freed["b"] == freed["n"] + freed["m"]


def test_a_norm_runs_again_once_however_often_it_is_asked_for() -> None:
    made, runs = layer(), []
    for norm in made.norms:
        norm.register_forward_hook(lambda *_: runs.append("hook"))
    plain = nn.functional.layer_norm
    state = ChunkState(0, (), ROWS, "n", Store({}))
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    calls = []
    nn.functional.layer_norm = lambda *a, **k: calls.append(1) or plain(*a, **k)
    try:
        out, _ = made(hidden_states=hidden, state=state)
        assert len(calls) == 2
        out.sum().backward()
        assert len(calls) == 4
    finally:
        nn.functional.layer_norm = plain


def test_a_promise_is_for_the_whole_tensor_only() -> None:
    dropped = DroppedOutputs()
    whole = torch.ones(4, 2)
    with dropped.by(frozenset({"layernorm"})):
        dropped.add(whole, SimpleNamespace())
        assert dropped.take(whole[:2]) is None
        assert dropped.take(whole.view(8)) is not None
        assert dropped.take(whole) is None  # taken
        dropped.add(whole, SimpleNamespace())
    assert dropped.take(whole) is None  # forgotten with the pass


# ------------------------------------------------------------------ attention


def attention(again: bool, context: int) -> tuple[int, list[Tensor]]:
    tokens, heads, groups, size = 12, 4, 2, 8
    torch.manual_seed(3)
    store = Store({0: context})
    if context:
        store.append(0, 0, 0, *torch.randn(2, context, groups, size, dtype=torch.float64))
    span = Span(0, context, context + tokens)
    state = ChunkState(0, (Rows(0, tokens, span, context > 0, True),), tokens, "c", store)
    q = torch.randn(tokens, heads, size, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(tokens, groups, size, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    meter, dropped = SavedBytesMeter([]), DroppedOutputs()
    projection = nn.Linear(heads * size, 4, bias=False).double()
    wrap_consumer(projection, dropped)
    with meter.watch(Store({})), dropped.by(frozenset({"core_attn"} if again else ())):
        handle = AttentionRecompute() if again else None
        out = ChunkAttention.apply(q, k, v, state, 0, size**-0.5, handle)
        if again:
            dropped.add(out, handle)
        loss = projection(out.flatten(1)).square().sum()
        del out
        held = meter.now
        loss.backward()
    return held, [q.grad, k.grad, v.grad, projection.weight.grad]


@pytest.mark.parametrize("context", [0, 20])
def test_attention_is_made_again_over_what_is_kept(context) -> None:
    kept_bytes, kept = attention(False, context)
    bytes_, recomputed = attention(True, context)
    for mine, theirs in zip(recomputed, kept, strict=True):
        assert torch.equal(mine, theirs)
    # The output (12 rows, 4 heads of 8) and its log-sum-exp are not held.
    assert kept_bytes - bytes_ >= 12 * 4 * 8 * BYTES


def test_several_outputs_are_made_again_from_the_inputs_alone() -> None:
    """And the gradient of a weight that is used elsewhere, too, arrives once, as one sum."""
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    arrivals: list[Tensor] = []

    def gradients(again: bool) -> tuple[int, list[Tensor]]:
        linear = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False).double()
        nn.init.constant_(linear.weight, 0.3)
        inputs = [t.clone().requires_grad_() for t in (x, y)]
        linear.weight.register_post_accumulate_grad_hook(arrivals.append)

        def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            made = linear(a * b).tanh()
            return made[:, :HIDDEN].contiguous(), made[:, HIDDEN:].sigmoid()

        def with_weight(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            return *function(a, b), linear.weight.view_as(linear.weight)

        meter = SavedBytesMeter(linear.parameters())
        with meter.watch(Store({})):
            if again:
                outputs, handles = recomputable_all(with_weight, inputs)
                with_handles = list(zip(outputs, handles, strict=True))
            else:
                outputs, with_handles = with_weight(*inputs), []
            first, second, weight = outputs
            loss = saving_handles(
                with_handles, lambda: first.square().sum() + second.square().sum()
            )
            held = meter.now
            (loss + (inputs[0] @ weight.t()).sum()).backward()
            assert meter.now == 0
        return held, [t.grad for t in (*inputs, linear.weight)]

    held, plain = gradients(again=False)
    less, mine = gradients(again=True)
    assert len(arrivals) == 2  # one each
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
    assert less == 2 * ROWS * HIDDEN * BYTES < held


def test_what_needs_no_gradient_gets_none() -> None:
    a = torch.ones(4, dtype=torch.float64)
    b = torch.ones(4, dtype=torch.float64, requires_grad=True)
    frozen = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
    (made, _), _ = recomputable_all(lambda a, b: (a * b * frozen, frozen.view_as(frozen)), (a, b))
    made.sum().backward()
    assert a.grad is None and frozen.grad is None
    assert torch.equal(b.grad, torch.ones_like(b))
