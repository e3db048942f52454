"""Recompute of slices that a budget of bytes asks for: enough, and no more."""

import dataclasses

import numpy as np
import pytest

from megatron_epp.cost.analytic import profile, without_states
from megatron_epp.cost.catalogue.devices import device
from megatron_epp.cost.catalogue.models import model
from megatron_epp.cost.loads import plan_loads
from megatron_epp.cost.profile import Bytes, Workspace
from megatron_epp.ir import FULL, KEEP, Chunk, Kind, Plan, PlanError, Span, check
from megatron_epp.planner.calls.call_cost import ActivationBudget
from megatron_epp.planner.calls.call_options import CallOptions
from tests.planner.calls.one_replica import call_plan
from tests.planner.calls.test_group_order import CURVED, rates

LENGTHS = [(200,), (200, 100), (4000,), (150,), (900,), (1200, 300)]
LAYERS = (4, 4)


def memory(budget: float) -> ActivationBudget:
    """A byte a token and layer where it is kept, a tenth where it is not; two a token of logits;
    a tenth for K and V of cut documents, and for their gradients."""
    made = without_states(profile(model("llama3-8b"), device("cpu"), link_seconds=False))
    return ActivationBudget(
        budget,
        dataclasses.replace(
            made,
            saved_bytes={**made.saved_bytes, KEEP: Bytes(1.0, 1.0), FULL: Bytes(0.1, 0.1)},
            recompute_workspace_bytes={
                **made.recompute_workspace_bytes, FULL: Bytes(0.9, 0.9)
            },
            kv_bytes_per_token=0.1,
            kv_gradient_bytes_per_token=0.1,
            last_bytes=Bytes(2.0, 2.0),
            last_workspace_bytes=dict.fromkeys(made.last_workspace_bytes, Workspace()),
        ),
    )  # fmt: skip


def planned(budget: float | None) -> Plan:
    options = CallOptions(memory=None if budget is None else memory(budget))
    plan = call_plan(LENGTHS, LAYERS, rates(2, CURVED), options, False)
    check(plan)
    return plan


def peaks(plan: Plan, micro_batches=LENGTHS) -> list[float]:
    """Bytes that every stage holds at most between ops, counted op by op: what chunks hold from F
    to B, K and V of a cut document from its first F to its last B."""
    lengths = plan.documents
    of = [number for number, group in enumerate(micro_batches) for _ in group]
    most = []
    for stage, order in enumerate(plan.orders):
        last = stage == plan.stages - 1
        filled = [chunk for chunk in plan.chunks if chunk.spans]
        left = {n: sum(of[c.spans[0].document] == n for c in filled) for n in set(of)}
        now = peak = 0.0
        held, kv = {}, {}
        for op in order:
            chunk = plan.chunks[op.chunk]
            if not chunk.spans:
                continue
            document = chunk.spans[0].document
            cut = chunk.spans[0].tokens < lengths[document]
            if op.kind is Kind.FORWARD:
                again = plan.recompute[stage][op.chunk].count("f")
                kept = plan.recompute[stage][op.chunk].count("k")
                number = of[document]
                left[number] -= 1
                per_token = kept + 0.1 * again + 2.0 * (last and left[number] == 0)
                held[op.chunk] = per_token * chunk.tokens
                now += held[op.chunk]
                if cut and document not in kv:
                    cuts = [c for c in filled if c.spans[0].document == document]
                    context = lengths[document] - max(c.spans[0] for c in cuts).tokens
                    kv[document] = 0.1 * (kept + again) * context
                    now += kv[document]
                peak = max(peak, now)
            else:
                now -= held.pop(op.chunk)
                if cut and chunk.spans[0].start == 0:
                    now -= kv.pop(document)
        assert not held and not kv
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
    documents = [(count,) for count in tokens]
    options = CallOptions(cut=False, memory=memory(budget))
    plan = call_plan(documents, LAYERS, rates(2), options, False)
    check(plan)
    letters = "".join("".join(row) for row in plan.recompute)
    assert "f" in letters and "k" in letters
    assert max(peaks(plan, [(count,) for count in tokens])) <= budget
    with pytest.raises(PlanError, match="no order of whole micro-batches holds so little"):
        options = CallOptions(cut=False, memory=memory(900.0))
        call_plan(documents, LAYERS, rates(2), options, False)


def test_no_room_is_one_line() -> None:
    with pytest.raises(PlanError, match="no order of slices holds so little, not even with all la"):
        planned(500.0)


def test_figures_follow_from_the_models_shape() -> None:
    class Config:
        num_layers, hidden_size, ffn_hidden_size = 4, 64, 256
        num_attention_heads, num_query_groups, kv_channels = 4, 2, 16
        gated_linear_unit, tensor_model_parallel_size = False, 1
        params_dtype = np.dtype("float64")

    token = plan_loads((Chunk((Span(0, 0, 1),)),), (1,))
    two = plan_loads((Chunk((Span(0, 0, 1),)), Chunk((Span(0, 1, 2),))), (2,))

    def bytes_of(letter: str) -> float:
        """A layer's per token."""
        one = ActivationBudget.of(Config, 97, 1e6)
        return float(one.cost((1,)).memory.saved_bytes((0, letter), token)[0])

    assert bytes_of(FULL) == 64 * 8  # a layer's input
    # Four norms' inputs and outputs, queries and the output, K and V, the MLP's insides.
    assert bytes_of(KEEP) == 8 * (4 * 64 + 2 * 64 + 2 * 32 + 2 * 256)
    one = ActivationBudget.of(Config, 97, 1e6)
    gradients = float(one.cost((1,)).memory.kv_gradient_bytes(two)[0, 0])
    assert gradients == 8 * 2 * 32  # of the one token of context
    whole = bytes_of(KEEP)
    Config.tensor_model_parallel_size = 2
    assert bytes_of(KEEP) == whole / 2
