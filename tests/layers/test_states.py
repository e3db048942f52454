"""Layers with a state: the scans of hosts without a GPU, and states over borders between calls."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_epp.ir import Kind, Plan, slices_of
from megatron_epp.layers.chunk_state import ChunkState, chunk_rows, store_for
from megatron_epp.layers.concatenated import concatenated
from megatron_epp.layers.ssm import carried
from megatron_epp.layers.ssm.carried import CarriedStates
from megatron_epp.layers.ssm.scans import SCAN_ROWS, causal_conv, gated_delta_rule, selective_scan
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import SavedBytesMeter

HEADS, GROUPS, VALUES, KEYS, TAPS = 4, 2, 3, 5, 4
Scan = Callable[..., tuple[Tensor, Tensor]]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mamba_inputs(rows: int) -> tuple[Tensor, ...]:
    x, dt = drawn(rows, HEADS, VALUES), F.softplus(drawn(rows, HEADS))
    return x, dt, -drawn(HEADS).exp(), drawn(rows, GROUPS, KEYS), drawn(rows, GROUPS, KEYS)


def mamba_by_row(x, dt, A, B, C, state) -> tuple[Tensor, Tensor]:
    outputs = []
    for row in range(len(x)):
        b, c = (y[row].repeat_interleave(HEADS // GROUPS, 0) for y in (B, C))
        decay = (dt[row] * A).exp()[:, None, None]
        state = decay * state + dt[row][:, None, None] * x[row][:, :, None] * b[:, None]
        outputs.append((state * c[:, None]).sum(-1))
    return torch.stack(outputs), state


def delta_inputs(rows: int) -> tuple[Tensor, ...]:
    q, k = (F.normalize(drawn(rows, HEADS, KEYS), dim=-1) for _ in range(2))
    g, beta = -drawn(rows, HEADS, 1).exp(), drawn(rows, HEADS).sigmoid()
    return q, k, drawn(rows, HEADS, VALUES), g, beta


def delta_by_row(q, k, v, g, beta, state) -> tuple[Tensor, Tensor]:
    outputs = []
    for row in range(len(q)):
        state = g[row].exp()[:, :, None] * state
        read = torch.einsum("hk,hkp->hp", k[row], state)
        changed = beta[row][:, None] * (v[row] - read)
        state = state + k[row][:, :, None] * changed[:, None]
        outputs.append(torch.einsum("hk,hkp->hp", q[row], state))
    return torch.stack(outputs), state


def delta(q, k, v, g, beta, state) -> tuple[Tensor, Tensor]:
    return gated_delta_rule(q, k, v, g, beta, 1.0, state)


@pytest.mark.parametrize("rows", [1, 64, 150])
@pytest.mark.parametrize(
    ("scan", "by_row", "inputs", "state"),
    [
        (selective_scan, mamba_by_row, mamba_inputs, (HEADS, VALUES, KEYS)),
        (delta, delta_by_row, delta_inputs, (HEADS, KEYS, VALUES)),
    ],
    ids=["mamba", "delta"],
)
def test_a_scan_in_blocks_is_the_one_by_row(rows, scan, by_row, inputs, state) -> None:
    torch.manual_seed(rows)
    given = (*inputs(rows), drawn(*state))
    made = []
    for way in (scan, by_row):
        mine = [one.detach().clone().requires_grad_() for one in given]
        output, final = way(*mine)
        loss = (output * output.detach().cos()).sum() + final.square().sum()
        made.append([output, final, *torch.autograd.grad(loss, mine)])
    for found, wanted in zip(*made, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("scan", "inputs", "state"),
    [
        (selective_scan, mamba_inputs, (HEADS, VALUES, KEYS)),
        (delta, delta_inputs, (HEADS, KEYS, VALUES)),
    ],
    ids=["mamba", "delta"],
)
def test_rows_behind_the_last_block_keep_no_copy_of_the_others(scan, inputs, state) -> None:
    def saved(rows: int) -> int:
        """Where all that is scanned lies in one tensor, as in layers."""
        made = inputs(rows)
        of_rows = [one.flatten(1) for one in made if len(one) == rows]
        parts = torch.cat(of_rows, 1).requires_grad_().split([one.shape[1] for one in of_rows], 1)
        scanned = iter(parts)
        given = [next(scanned).view_as(one) if len(one) == rows else one for one in made]
        given.append(drawn(*state).requires_grad_())
        meter = SavedBytesMeter([])
        with meter.watch(Store({})):
            made = scan(*given)
            assert made[0].requires_grad
            return meter.now

    rows = 20 * SCAN_ROWS
    assert saved(rows + 1) - saved(rows) < rows * HEADS * VALUES * 8


# --- over borders ---------------------------------------------------------------------------------

CHANNELS = HEADS * VALUES + 2 * GROUPS * KEYS
# Document 0 in slices whose last is one row, and 2 in two, the first of fewer rows than a
# convolution sees; whole ones before and behind slices.
PLAN = """plan v1
replica 0 of 1
documents 12 3 9 2
layers 1
chunk 0: 0[0:2]
chunk 1: 1[0:3] 2[0:2]
chunk 2: 0[2:11]
chunk 3: 2[2:9] 3[0:2]
chunk 4: 0[11:12]
recompute 0: 1k 1k 1k 1k 1k
stage 0: F0 F1 F2 F3 F4 B4 B3 B2 B1 B0
"""


def layer(rows: Tensor, weights: tuple[Tensor, ...], states: CarriedStates) -> Tensor:
    """A convolution and a scan, as a mixer has them."""
    taps, decay = weights
    outputs = []
    for number, call in enumerate(states.calls):
        mine = rows[call.start : call.stop]
        front = states.front(number, mine)
        count = 0 if front is None else len(front)
        seen = mine if front is None else torch.cat((front, mine))
        states.after(number, seen)
        state, made = states.initial(number), []
        starts = states.boundaries(number, count, rows.device).tolist()
        for start, stop in pairwise(starts):
            x, B, C = (
                causal_conv(seen[start:stop], taps, None)[count if start == 0 else 0 :]
                .tanh()
                .split((HEADS * VALUES, GROUPS * KEYS, GROUPS * KEYS), 1)
            )
            x, B, C = x.unflatten(1, (HEADS, -1)), *(y.unflatten(1, (GROUPS, -1)) for y in (B, C))
            dt = x.square().sum(-1)
            y, final = selective_scan(x, dt, -decay.exp(), B, C, state)
            made.append(y)
            state = None
        wanted = final if states.wants_final(number) else None
        outputs.append(states.leave(number, torch.cat(made), wanted))
    return concatenated(outputs)


def state_of(plan: Plan, chunk: int, store, training: bool, padding: int) -> ChunkState:
    rows = chunk_rows(plan, slices_of(plan), chunk)
    return ChunkState(chunk, rows, rows[-1].stop + padding, "k", store, training)


@pytest.mark.parametrize("most", [carried.MOST_ELEMENTS, 2 * CHANNELS])
@pytest.mark.parametrize("padding", [0, 2])
def test_slices_compute_what_whole_documents_do(most, padding, monkeypatch) -> None:
    """Also where a kernel takes two rows at a time."""
    monkeypatch.setattr(carried, "MOST_ELEMENTS", most)
    monkeypatch.setattr(carried, "BLOCK_ROWS", 1)
    torch.manual_seed(3)
    plan = Plan.parse(PLAN)
    inputs = [drawn(length, CHANNELS).requires_grad_() for length in plan.documents]
    weights = drawn(CHANNELS, TAPS).requires_grad_(), drawn(HEADS).requires_grad_()
    factors = [drawn(length, HEADS, VALUES) for length in plan.documents]

    def gradients() -> list[Tensor]:
        found = [one.grad.clone() for one in (*inputs, *weights)]
        for one in (*inputs, *weights):
            one.grad = None
        return found

    whole = Plan.parse(
        "plan v1\nreplica 0 of 1\ndocuments 12 3 9 2\nlayers 1\nchunk 0: 0[0:12]\n"
        "chunk 1: 1[0:3]\nchunk 2: 2[0:9]\nchunk 3: 3[0:2]\nrecompute 0: 1k 1k 1k 1k\n"
        "stage 0: F0 B0 F1 B1 F2 B2 F3 B3\n"
    )
    monkeypatch.setattr(carried, "MOST_ELEMENTS", 2**30)
    outputs = []
    for document in range(4):
        states = CarriedStates(state_of(whole, document, None, True, 0), 0, TAPS, CHANNELS)
        outputs.append(layer(inputs[document], weights, states))
        (outputs[-1] * factors[document]).sum().backward()
    wanted = gradients()
    monkeypatch.setattr(carried, "MOST_ELEMENTS", most)

    for training in (False, True):
        store, losses = store_for(plan, slices_of(plan), stores_last_slice=False), {}
        for op in plan.orders[0]:
            if op.kind is not Kind.FORWARD:
                if training:
                    losses[op.chunk].backward()
                continue
            state = state_of(plan, op.chunk, store, training, padding)
            pads = torch.randn(padding, CHANNELS).double()
            rows = [inputs[r.span.document][r.span.start : r.span.stop] for r in state.rows]
            with torch.set_grad_enabled(training):
                y = layer(
                    torch.cat((*rows, pads)), weights, CarriedStates(state, 0, TAPS, CHANNELS)
                )
            assert len(y) == state.tokens
            for r in state.rows:
                mine = outputs[r.span.document][r.span.start : r.span.stop]
                torch.testing.assert_close(y[r.start : r.stop], mine, rtol=1e-12, atol=1e-12)
            if training:
                parts = [
                    (y[r.start : r.stop] * factors[r.span.document][r.span.start : r.span.stop])
                    for r in state.rows
                ]
                losses[op.chunk] = torch.stack([part.sum() for part in parts]).sum()
        assert not len(store)  # of evaluation, too
        rows_kept = 3 * (HEADS * VALUES * KEYS + (TAPS - 1) * CHANNELS) * 8  # of three borders
        assert store.peak_bytes <= (2 if training else 1) * rows_kept
    for found, each in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-11, atol=1e-11)
