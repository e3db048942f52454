"""The closed forms in docs/reference/plan_format.md, played by the simulator on equal chunks.

p stages, m packed micro-batches, each cut into n slices of equal time (n 1: whole). A micro-batch
takes a stage f seconds forward and b backward, of which half is for the weights; it holds one unit
of activations on the whole model, so 1 / p on a stage.
"""

import numpy as np
import pytest

from megatron_epp.ir import Chunk, Item, Kind, Op, Plan, Span
from megatron_epp.sim.play import Simulation, play
from tests.sim.test_play import even_table, one_f_one_b

CASES = [(p, m) for p in (2, 3, 4, 8) for m in (8, 11)]  # m >= p
# One micro-batch forward and backward, in units that slices divide without a remainder.
F, B = 12.0, 24.0
HELD = 1920  # bytes of a micro-batch on the whole model; K/V of it, too


def plan_of(stages: int, documents: int, slices: int, orders: list[list[Op]]) -> Plan:
    chunks = tuple(
        Chunk((Span(d, i, i + 1),)) for d in range(documents) for i in range(slices)
    )  # fmt: skip
    recompute = tuple(("k",) * len(chunks) for _ in range(stages))
    return Plan((slices,) * documents, (1,) * stages, chunks, recompute, tuple(map(tuple, orders)))


def played(plan: Plan, slices: int) -> Simulation:
    """On chunks of equal time; messages take none."""
    held = HELD / plan.stages * np.ones((plan.stages, len(plan.chunks)))
    documents = HELD / plan.stages * np.ones((plan.stages, len(plan.documents)))
    table = even_table(plan, F / slices, B / slices)
    table.held_bytes[Item.ACTIVATIONS] = held / slices
    # W's inputs: what a stage held for the chunk, until its W has run.
    table.held_bytes[Item.WEIGHT_INPUTS] = held / slices
    table.held_bytes[Item.KV] = documents * (slices > 1)
    return play(plan, table)


def zero_bubble(stages: int, documents: int) -> Plan:
    """ZB-H1: 1F1B's forwards and input halves; stage s runs the W of a micro-batch s later."""
    orders = []
    for stage in range(stages):
        held = min(documents, stages - stage)
        order = [Op(Kind.FORWARD, i) for i in range(held)]
        for i in range(documents):
            order.append(Op(Kind.INPUT, i))
            if i >= stage:
                order.append(Op(Kind.WEIGHT, i - stage))
            if i + held < documents:
                order.append(Op(Kind.FORWARD, i + held))
        order += [Op(Kind.WEIGHT, i) for i in range(max(0, documents - stage), documents)]
        orders.append(order)
    return plan_of(stages, documents, 1, orders)


@pytest.mark.parametrize("n", (1, 2, 4, 8))
@pytest.mark.parametrize(("p", "m"), CASES)
def test_slices(p: int, m: int, n: int) -> None:
    made = played(one_f_one_b(p, [n] * m), n)
    assert made.bubble_ratio == pytest.approx((p - 1) / (n * m + p - 1), abs=1e-12)
    assert made.seconds == pytest.approx((F + B) / n * (n * m + p - 1))
    if n == 1:  # 1F1B: p micro-batches of HELD / p, and no K/V
        assert max(made.peak_bytes) == HELD
        return
    # A document keeps its K/V until its first slice's backward; meanwhile others have begun.
    held = HELD / p * (n + p - 1) / n
    begun = min(m, 1 + -(-(n + p - 2) // n))
    assert held + HELD / p <= max(made.peak_bytes) <= held + begun * HELD / p


@pytest.mark.parametrize(("p", "m"), CASES)
def test_split_backward(p: int, m: int) -> None:
    made = played(zero_bubble(p, m), 1)
    f, i, w = F, B / 2, B / 2
    bubble = (p - 1) * (f + i - w)
    assert made.seconds == m * (f + i + w) + bubble
    assert made.bubble_ratio == pytest.approx(bubble / (m * (f + i + w) + bubble), abs=1e-12)
    # p micro-batches of HELD / p, as 1F1B; while an I runs the rules count its own twice: what it
    # frees and what it leaves for its W.
    assert max(made.peak_bytes) == HELD + HELD / p
