"""What slices recompute so that they fit into a budget of bytes: enough, and no more."""

import numpy as np
import pytest

from megatron_epp.ir import Kind, Plan, PlanError, check
from megatron_epp.planner.calls.call_plan import Freedom, whole_plan
from megatron_epp.planner.calls.extent import Extent
from megatron_epp.planner.calls.memory import Memory
from megatron_epp.planner.calls.slicing import sliced_plan
from tests.planner.calls.test_ordering import CURVED, rates

LENGTHS = [(200,), (200, 100), (4000,), (150,), (900,), (1200, 300)]
LAYERS = (4, 4)


def memory(budget: float) -> Memory:
    """A byte a token and layer where it is kept, a tenth where it is not."""
    return Memory(budget, 1.0, 1.2, 0.1, 0.3, 2.0)


def planned(budget: float | None) -> Plan:
    freedom = Freedom(memory=None if budget is None else memory(budget))
    plan = sliced_plan(LENGTHS, LAYERS, rates(2, CURVED), freedom, False)
    check(plan)
    return plan


def peaks(plan: Plan, micro_batches=LENGTHS) -> list[float]:
    """Bytes that every stage holds at most, counted op by op."""
    lengths = plan.documents
    of = [number for number, group in enumerate(micro_batches) for _ in group]
    most = []
    for stage, order in enumerate(plan.orders):
        last = stage == plan.stages - 1
        left = {n: sum(of[c.spans[0].document] == n for c in plan.chunks) for n in set(of)}
        now = peak = 0.0
        held = {}
        for op in order:
            chunk = plan.chunks[op.chunk]
            if op.kind is Kind.FORWARD:
                cut = chunk.spans[0].tokens < lengths[chunk.spans[0].document]
                again = plan.recompute[stage][op.chunk].count("f")
                kept = plan.recompute[stage][op.chunk].count("k")
                number = of[chunk.spans[0].document]
                left[number] -= 1
                per_token = kept * (1.2 if cut else 1.0) + again * (0.3 if cut else 0.1)
                per_token += 2.0 * (last and left[number] == 0)
                held[op.chunk] = per_token * chunk.tokens
                now += held[op.chunk]
                peak = max(peak, now)
            else:
                now -= held.pop(op.chunk)
        most.append(peak)
    return most


def test_where_there_is_room_nothing_is_recomputed() -> None:
    plan = planned(1e9)
    assert not any("f" in letters for row in plan.recompute for letters in row)


@pytest.mark.parametrize("budget", [16_000.0, 12_000.0, 9_000.0])
def test_little_room_is_filled_and_kept_to(budget) -> None:
    plan = planned(budget)
    letters = "".join("".join(row) for row in plan.recompute)
    assert "f" in letters and "k" in letters
    assert max(peaks(plan)) <= budget
    assert not plan.splits_backward
    assert plan.predicted.seconds > planned(1e9).predicted.seconds


def test_less_room_takes_longer() -> None:
    seconds = [planned(budget).predicted.seconds for budget in (40_000.0, 16_000.0, 9_000.0)]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]


@pytest.mark.parametrize("budget", [12_000.0, 10_000.0])
def test_whole_micro_batches_keep_to_it_too(budget) -> None:
    tokens = [200, 300, 2000, 150, 900, 1500]
    extents = [Extent(count) for count in tokens]
    plan = whole_plan(extents, LAYERS, rates(2), Freedom(memory=memory(budget)), False)
    check(plan)
    letters = "".join("".join(row) for row in plan.recompute)
    assert "f" in letters and "k" in letters
    assert max(peaks(plan, [(count,) for count in tokens])) <= budget
    with pytest.raises(PlanError, match="no order of whole micro-batches holds so little"):
        whole_plan(extents, LAYERS, rates(2), Freedom(memory=memory(900.0)), False)


def test_no_room_is_one_line() -> None:
    with pytest.raises(PlanError, match="no order of slices holds so little, not even with all la"):
        planned(500.0)


def test_figures_follow_from_the_models_shape() -> None:
    class Config:
        num_layers, hidden_size, ffn_hidden_size = 4, 64, 256
        num_attention_heads, num_query_groups, kv_channels = 4, 2, 16
        gated_linear_unit, tensor_model_parallel_size = False, 1
        params_dtype = np.dtype("float64")

    one = Memory.of(Config, 97, 1e6)
    assert one.recomputed == 64 * 8  # a layer's input
    # Four norms' inputs and outputs, queries and the output, K and V, the MLP's insides.
    assert one.kept == 8 * (4 * 64 + 2 * 64 + 2 * 32 + 2 * 256)
    assert one.kept_of_cut - one.kept == 4 * 4 * 2 * 32  # K's and V's gradients, in float32
    Config.tensor_model_parallel_size = 2
    assert Memory.of(Config, 97, 1e6).kept == one.kept / 2
