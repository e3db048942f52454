"""Windows and sinks in chunks, against scores, mask and softmax of whole documents."""

from random import Random

import pytest
import torch
from torch import Tensor

from megatron_epp.ir.random_plan import arbitrary_plan
from megatron_epp.layers import window
from megatron_epp.layers.attention.cpu import PartsAttention
from megatron_epp.layers.attention.reference import ReferenceKernel
from megatron_epp.layers.attention.varlen import VarlenAttention
from megatron_epp.layers.chunk_state import store_for
from tests.layers.runner import (
    LAYER,
    ROWS,
    SCALE,
    Documents,
    Runner,
    documents,
    errors,
    naive,
    plan_of,
)

HEADS, GROUPS = 4, 2
# Of CPUs, and what is around a kernel of GPUs.
ATTENTIONS = {
    "parts": PartsAttention(SCALE),
    "one call a slice": VarlenAttention(ReferenceKernel(SCALE)),
}


def sinks() -> Tensor:
    return torch.linspace(-1, 2, HEADS, dtype=torch.float64)


class Seeing(Runner):
    """``before`` and ``sinks_H`` of the layer; the store keeps tails."""

    def __init__(self, plan, given, multiple=1, before=None, sinks_H=None, known=True, of="parts"):
        super().__init__(plan, given, multiple)
        attention = ATTENTIONS[of]
        self.store = store_for(plan, self.slices, attention.stores_last_slice)
        if not known:
            self.store.boundaries.clear()
        self.weights = () if sinks_H is None else (sinks_H.clone().requires_grad_(),)
        self.attend = attention.of_layer(before, lambda: next(iter(self.weights), None))

    def attention(self, state, inputs) -> Tensor:
        return self.attend(*inputs, state, LAYER, False)[0]


def require_exact(
    plan, given: Documents, before, sinks_H=None, multiple=1, known=True, of="parts"
) -> Seeing:
    runner = Seeing(plan, given, multiple, before, sinks_H, known, of)
    found = errors(runner.run(), naive(given, before, sinks_H))
    assert max(found.values()) < 1e-13, (found, str(plan))
    return runner


@pytest.mark.parametrize("of", ATTENTIONS)
@pytest.mark.parametrize("before", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("kind", ROWS)
def test_every_kind_of_row(kind, before, of) -> None:
    """Windows shorter than every slice, and longer than the longest document."""
    given = documents(ROWS[kind].documents, HEADS, GROUPS, torch.float64)
    for multiple in (1, 8):
        require_exact(ROWS[kind], given, before, sinks(), multiple, of=of)


@pytest.mark.parametrize("seed", range(30))
def test_arbitrary_plans_with_recompute(seed) -> None:
    random = Random(seed)
    lengths = tuple(random.randint(1, 30) for _ in range(random.randint(1, 5)))
    plan = arbitrary_plan(lengths, (1,), random)
    given = documents(lengths, HEADS, GROUPS, torch.float64, seed)
    before = random.choice((1, 2, 5, 9, 40))
    of_layer = before, random.choice((None, sinks()))
    for of in ATTENTIONS:
        require_exact(plan, given, *of_layer, known=seed % 3 > 0, of=of)


def test_tiles(monkeypatch) -> None:
    """Documents and slices of many tiles, the last one not full."""
    monkeypatch.setattr(window, "LEAST_TILE", 4)
    given = documents((61, 30), HEADS, GROUPS, torch.float64)
    whole = plan_of((61, 30), ["0[0:61] 1[0:30]"], "F0 B0")
    cut = plan_of((61, 30), ["0[0:31]", "0[31:61] 1[0:30]"], "F0 F1 B1 B0")
    for plan in (whole, cut):
        for before in (2, 4, 6):
            require_exact(plan, given, before)


@pytest.mark.parametrize("of", ATTENTIONS)
def test_the_gradient_of_the_sinks(of) -> None:
    given = documents((23, 6), HEADS, GROUPS, torch.float64)
    plan = plan_of((23, 6), ["0[0:8]", "0[8:9] 1[0:6]", "0[9:23]"], "F0 F1 F2 B2 B1 B0")
    for before in (None, 4):
        runner = require_exact(plan, given, before, sinks(), 8, of=of)
        total = sum(share for (share,) in runner.learnt)
        expected = sum(each[4] for each in naive(given, before, sinks()))
        torch.testing.assert_close(total, expected, rtol=1e-13, atol=1e-13)


# ------------------------------------------------------------------ what is kept


@pytest.mark.parametrize("of", ATTENTIONS)
def test_only_tails_are_kept(of) -> None:
    plan = plan_of(
        (40,), ["0[0:20]", "0[20:22]", "0[22:30]", "0[30:40]"], "F0 F1 F2 F3 B3 B2 B1 B0"
    )
    given = documents((40,), HEADS, GROUPS, torch.float64)
    runner = require_exact(plan, given, 4, of=of)
    row = given[0][1][0].nbytes
    # Of each slice but the last at most 4 rows: K, V, and as much for their gradients.
    assert runner.store.peak_bytes == (4 + 2 + 4) * row * 4
    assert not runner.attend.stores_last_slice
    without = require_exact(plan, given, None, of=of)
    last = 10 * row * 2 if without.attend.stores_last_slice else 0
    assert without.store.peak_bytes == 30 * row * 4 + last
