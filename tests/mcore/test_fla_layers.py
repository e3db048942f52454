"""Layers of frameworks, of flash-linear-attention's modules: Kimi's delta attention in slices."""

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_epp.ir import Kind, Plan, slices_of
from megatron_epp.layers.chunk_state import ChunkState, chunk_rows, store_for
from megatron_epp.layers.recompute.outputs import DroppedOutputs
from megatron_epp.layers.ssm.scans import causal_conv, gated_delta_rule
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.kinds.base import LayerPlace
from megatron_epp.mcore.kinds.modules import kinds_of_layer
from tests.layers.test_states import PLAN

HIDDEN, HEADS, KEYS, VALUES, TAPS = 6, 2, 3, 5, 4


def sequences(boundaries: Tensor | None, rows: int) -> list[tuple[int, int]]:
    return list(pairwise([0, rows] if boundaries is None else boundaries.tolist()))


class ShortConvolution(nn.Module):
    """fla.modules', by torch."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, TAPS).double())

    def forward(self, x, cu_seqlens=None, output_final_state=False):
        assert not output_final_state
        parts = [
            causal_conv(x[0, start:stop], self.weight[:, 0], None)
            for start, stop in sequences(cu_seqlens, x.shape[1])
        ]
        return F.silu(torch.cat(parts))[None], None


def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    cu_seqlens=None,
):
    """fla.ops.kda's, by torch: normed keys, and the gate inside of the kernel."""
    assert use_qk_l2norm_in_kernel and use_gate_in_kernel
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    g = -A_log.exp()[:, None] * F.softplus(g + dt_bias.unflatten(0, (len(A_log), -1)))
    outputs, finals = [], []
    for number, (start, stop) in enumerate(sequences(cu_seqlens, q.shape[1])):
        state = None if initial_state is None else initial_state[number]
        parts = (x[0, start:stop] for x in (q, k, v, g, beta))
        y, final = gated_delta_rule(*parts, q.shape[-1] ** -0.5, state)
        outputs.append(y)
        finals.append(final)
    return torch.cat(outputs)[None], torch.stack(finals) if output_final_state else None


class KimiAttention(nn.Module):
    """Kimi Linear (arXiv 2510.26692), figure 3, with linears where it has two of low rank."""

    def __init__(self) -> None:
        super().__init__()
        keys, values = HEADS * KEYS, HEADS * VALUES
        sizes = {"q": keys, "k": keys, "v": values, "f": keys, "b": HEADS, "g": values}
        for name, size in sizes.items():
            setattr(self, f"{name}_proj", nn.Linear(HIDDEN, size, bias=False, dtype=torch.float64))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = map(ShortConvolution, (keys, keys, values))
        self.A_log = nn.Parameter(torch.randn(HEADS).double())
        self.dt_bias = nn.Parameter(torch.randn(keys).double())
        self.o_proj = nn.Linear(values, HIDDEN, bias=False, dtype=torch.float64)

    def forward(self, hidden_states, attention_mask=None, packed_seq_params=None):
        from fla.ops.kda import chunk_kda as rule

        x, boundaries = hidden_states.transpose(0, 1), None
        if packed_seq_params is not None:
            boundaries = packed_seq_params.cu_seqlens_q
        q, _ = self.q_conv1d(x=self.q_proj(x), cu_seqlens=boundaries)
        k, _ = self.k_conv1d(x=self.k_proj(x), cu_seqlens=boundaries)
        v, _ = self.v_conv1d(x=self.v_proj(x), cu_seqlens=boundaries)
        q, k, v, f = (y.unflatten(-1, (HEADS, -1)) for y in (q, k, v, self.f_proj(x)))
        y, _ = rule(
            q=q,
            k=k,
            v=v,
            g=f,
            beta=self.b_proj(x).sigmoid(),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            cu_seqlens=boundaries,
        )
        y = F.rms_norm(y, (VALUES,)) * self.g_proj(x).sigmoid().unflatten(-1, (HEADS, -1))
        return self.o_proj(y.flatten(2)).transpose(0, 1), None


@pytest.fixture
def layer(monkeypatch) -> SimpleNamespace:
    """A layer made to compute chunks, as a framework's specification would have it."""
    kda = ModuleType("fla.ops.kda")
    kda.chunk_kda = chunk_kda
    monkeypatch.setitem(sys.modules, "fla.ops.kda", kda)
    torch.manual_seed(5)
    made = SimpleNamespace(layer_number=1, self_attention=KimiAttention())
    (part,) = kinds_of_layer(made)
    part.install(LayerPlace(made, 0, 12, None, DroppedOutputs()))
    return made


def test_slices_compute_what_whole_documents_do(layer) -> None:
    """In evaluation, and in training with every second chunk recomputed."""
    plan, attention = Plan.parse(PLAN), layer.self_attention
    inputs = [torch.randn(n, 1, HIDDEN).double().requires_grad_() for n in plan.documents]
    factors = [torch.randn(n, 1, HIDDEN).double() for n in plan.documents]
    leaves = [*inputs, *attention.parameters()]

    def gradients() -> list[Tensor]:
        found = [one.grad.clone() for one in leaves]
        for one in leaves:
            one.grad = None
        return found

    outputs = [attention(x)[0] for x in inputs]  # not of a chunk: as it is
    sum((y * factor).sum() for y, factor in zip(outputs, factors, strict=True)).backward()
    wanted = gradients()

    for training in (False, True):
        store, losses = store_for(plan, slices_of(plan), stores_last_slice=False), {}
        for op in plan.orders[0]:
            if op.kind is not Kind.FORWARD:
                if training:
                    losses[op.chunk].backward()
                continue
            rows = chunk_rows(plan, slices_of(plan), op.chunk)
            state = ChunkState(op.chunk, rows, rows[-1].stop, "k", store, training)
            params = ChunkParams.of(state, torch.zeros(state.tokens, dtype=torch.int64))

            def run(x: Tensor, params: ChunkParams = params) -> Tensor:
                return attention(x, packed_seq_params=params)[0]

            def of_chunk(documents: list[Tensor], rows=rows) -> list[Tensor]:
                return [documents[r.span.document][r.span.start : r.span.stop] for r in rows]

            with torch.set_grad_enabled(training):
                x = torch.cat(of_chunk(inputs))
                again = training and op.chunk % 2
                y = checkpoint(run, x, use_reentrant=True) if again else run(x)
            torch.testing.assert_close(y, torch.cat(of_chunk(outputs)), rtol=1e-12, atol=1e-12)
            losses[op.chunk] = (y * torch.cat(of_chunk(factors))).sum()
        assert not len(store)
    for found, each in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-11, atol=1e-11)


def test_a_slice_leaves_what_is_said_of_it(layer) -> None:
    """Which calibration makes up."""
    (part,) = kinds_of_layer(layer)
    shapes = part.kept_shapes(layer, 7).shapes
    plan = Plan.parse(PLAN)
    store = store_for(plan, slices_of(plan), stores_last_slice=False)
    rows = chunk_rows(plan, slices_of(plan), 0)
    state = ChunkState(0, rows, rows[-1].stop, "k", store)
    params = ChunkParams.of(state, torch.zeros(state.tokens, dtype=torch.int64))
    layer.self_attention(torch.randn(2, 1, HIDDEN).double(), packed_seq_params=params)
    kept = store.context(0, 0, 1)
    assert tuple(tuple(each.shape) for each in kept) == shapes
