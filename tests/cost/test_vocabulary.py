"""The output layer cut over the stages: its seconds, messages and bytes against the whole one's."""

import dataclasses

import numpy as np
import pytest

from megatron_epp.cost.analytic import HEAD_BLOCK_TOKENS, profile
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.loads import plan_loads
from megatron_epp.cost.profile import Bytes, Profile, Seconds, Workspace
from megatron_epp.ir import KEEP, OF_HEAD, OF_LAYERS, Chunk, Item, Kind, Payload, Plan, Span

MODEL = MODELS["llama3-8b"]
HIDDEN_BYTES = 2 * MODEL.hidden
CHUNKS = (Chunk((Span(0, 0, 30_000),)), Chunk((Span(0, 30_000, 50_000),)), Chunk((Span(1, 0, 7),)))
LOADS = plan_loads(CHUNKS, (50_000, 7))


def cost(pp: int = 4, **how) -> Cost:
    return named_cost("llama3-8b", "h100-80g", pp=pp, **{"cp": 8, "zero": 1} | how)


@pytest.mark.parametrize("held", [False, True])
def test_the_work_is_four_thirds_of_the_last_stages_and_even(held: bool) -> None:
    """Logits, the input's gradient, the weight's: H does two of the three products, G two, as it
    makes the logits again; so held logits and the early head come to the same."""
    made = cost(logits_held=held)
    whole = made.replace(profile=made.layout.profile.each_kind(host_seconds={}))
    cut = whole.with_vocabulary(True)
    bare = np.zeros((4, LOADS.chunks))
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        bare += whole.seconds.of(kind, LOADS) - cut.seconds.of(kind, LOADS)
    assert (bare[:-1] == 0).all() and (bare[-1] > 0).all()
    assert bare[-1] == pytest.approx(
        6.0 * MODEL.vocabulary * MODEL.hidden / DEVICES["h100-80g"].linear_flops / 8 * LOADS.tokens
    )
    for kind in OF_HEAD:
        made = cut.seconds.of(kind, LOADS)
        assert made == pytest.approx(np.tile(bare[-1] * 2 / 3 / 4, (4, 1)))
    assert cut.seconds.of(Kind.WEIGHT, LOADS)[-1] == pytest.approx(
        cut.seconds.of(Kind.WEIGHT, LOADS)[1]
    )


def test_what_a_chunk_costs_whatever_its_size_is_not_spread() -> None:
    measured = profile(MODEL, DEVICES["h100-80g"])
    ends = dict(measured.last_seconds)
    ends[Kind.FORWARD] = Seconds(1e-7, 0.0, 3e-4)
    ends[Kind.BACKWARD] = Seconds(2e-7, 0.0, 6e-4)
    measured = dataclasses.replace(measured, last_seconds=ends)
    made = Cost(StageLayout(measured, (8, 8), vocabulary_parallel=True), (1e15, 1e15))
    head = made.seconds.per(Kind.HEAD)
    assert head[0] == pytest.approx([1e-7, 0.0, 6e-4])
    assert (head == made.seconds.per(Kind.HEAD_WEIGHT)).all() and (head[0] == head[1]).all()


def test_states_move_and_none_is_lost() -> None:
    whole, cut = cost(), cost(vocabulary_parallel=True)
    assert sum(cut.memory.parameters[0]) == pytest.approx(sum(whole.memory.parameters[0]))
    layers = MODEL.layers // 4 * whole.layout.profile.layer_parameters
    share = whole.layout.profile.last_parameters / 4
    assert cut.memory.parameters[0] == pytest.approx(
        [layers + share + whole.layout.profile.first_parameters, *[layers + share] * 3]
    )
    assert cut.memory.states_bytes[-1] < whole.memory.states_bytes[-1]
    assert cut.memory.states_bytes[0] > whole.memory.states_bytes[0]


def test_messages() -> None:
    """The output goes round; between stages two rows a token go with it, to the last stage
    alone. Evaluation wants no rows."""
    cut = cost(vocabulary_parallel=True)
    one = cut.seconds.link(LOADS)[0]
    table = cut.table_of(LOADS, {(0, KEEP): np.full((4, 3), 8.0)})
    rows = np.asarray(table.link_seconds[Payload.HEAD])
    assert (rows == np.array([3, 3, 2, 1])[:, None] * one).all()
    two = cost(pp=2, vocabulary_parallel=True)
    assert (
        two.ends.head_link_seconds(LOADS, False)[Payload.HEAD] == np.array([2, 1])[:, None] * one
    ).all()
    evaluated = cut.table_of(LOADS, {(0, KEEP): np.full((4, 3), 8.0)}, forward_only=True)
    rows = np.asarray(evaluated.link_seconds[Payload.HEAD])
    assert (rows == np.array([1, 1, 0, 1])[:, None] * one).all()
    assert len(table.link_seconds[Payload.ACTIVATION]) == 3


def test_bytes() -> None:
    cut = cost(logits_held=False, vocabulary_parallel=True)
    table = cut.table_of(LOADS, {(0, KEEP): np.full((4, 3), 8.0)})
    inputs = np.asarray(table.held_bytes[Item.HEAD_INPUTS])
    assert inputs == pytest.approx(np.tile(HIDDEN_BYTES * LOADS.tokens / 8, (4, 1)), abs=1)
    activations = np.asarray(table.held_bytes[Item.ACTIVATIONS])
    # On the last stage the output from F on, then its gradient.
    assert activations[3] - activations[1] == pytest.approx(inputs[0], abs=2)
    # Six bytes a logit, of a quarter of the words and a block of rows.
    block = np.minimum(LOADS.tokens / 8, HEAD_BLOCK_TOKENS[0])
    logits = 6 * MODEL.vocabulary / 4 * block
    gradient = 2 * MODEL.vocabulary_parameters / 4
    assert np.asarray(table.workspace_bytes[Kind.HEAD_WEIGHT])[2] == pytest.approx(
        logits + gradient, abs=1
    )
    assert np.asarray(table.workspace_bytes[Kind.HEAD])[2] == pytest.approx(
        logits + 4 * inputs[2], abs=4
    )
    whole = cost(logits_held=False).table_of(LOADS, {(0, KEEP): np.full((4, 3), 8.0)})
    assert (np.asarray(whole.workspace_bytes[Kind.FORWARD])[3] > 0).all()
    assert (np.asarray(table.workspace_bytes[Kind.FORWARD]) == 0).all()


def test_logits_that_would_be_held_are_not() -> None:
    held = cost(logits_held=True)
    more, less = (
        np.asarray(
            each.table_of(LOADS, {(0, KEEP): np.full((4, 3), 8.0)}).held_bytes[Item.ACTIVATIONS]
        )
        for each in (held, held.with_vocabulary(True))
    )
    assert (more[3] - less[3])[0] == pytest.approx(
        (4 * MODEL.vocabulary - HIDDEN_BYTES) * 30_000 / 8, abs=2
    )


def test_tensor_parallel_ranks_gather_the_output_for_each() -> None:
    cut = cost(tp=4, cp=2, vocabulary_parallel=True)
    for kind in OF_HEAD:
        per = cut.seconds.communication_per(kind)
        rate = cut.layout.profile.tensor_bytes_per_second[4]
        assert per[:, 0] == pytest.approx(HIDDEN_BYTES * 3 / 4 / 2 / rate)
    assert (cost(vocabulary_parallel=True).seconds.communication_per(Kind.HEAD) == 0).all()


def test_a_table_is_made_as_the_plan_is() -> None:
    text = (
        "plan v1\ndocuments 9\nlayers 16 16\nchunk 0: 0[0:9]\n"
        "stage 0: F0 H0 B0 G0\nstage 1: F0 H0 B0 G0\n"
    )
    cut, whole = Plan.parse(text), Plan.parse(text.replace(" H0", "").replace(" G0", ""))
    for made in (cost(pp=2), cost(pp=2, vocabulary_parallel=True)):
        assert set(made.table(cut).seconds) == {*OF_LAYERS, *OF_HEAD}
        assert set(made.table(whole).seconds) == set(OF_LAYERS)
        assert Item.HEAD_INPUTS not in made.table(whole).held_bytes
        assert made.table(cut).resident_bytes == made.with_vocabulary(True).memory.states_bytes


def test_a_measured_early_head_holds_what_the_last_stage_holds_here() -> None:
    """The norm's input and the gradient; not twice."""
    made = cost(logits_held=False)
    early = dataclasses.replace(
        made.layout.profile,
        last_bytes=Bytes(2 * HIDDEN_BYTES, 2 * HIDDEN_BYTES),
        last_workspace_tokens=9,
    )
    cut = made.replace(profile=early, vocabulary_parallel=True)
    assert cut.ends.held_bytes(LOADS)[-1] == pytest.approx(2 * HIDDEN_BYTES * LOADS.tokens / 8)
    assert (cut.ends.head_workspace_bytes(LOADS)[Kind.HEAD] < 1e9).all()


def test_measured_figures_of_h_and_g_stand_before_those_of_the_whole() -> None:
    made = cost(logits_held=False).layout.profile
    measured = dataclasses.replace(
        made,
        head_seconds={Kind.HEAD: Seconds(8e-7, 0.0, 1e-4)},
        head_workspace_bytes={Kind.HEAD_WEIGHT: Workspace(16.0, 16.0, 0.0, 4e6)},
    )
    assert Profile.from_json(measured.to_json()) == measured
    cut = Cost(StageLayout(measured, (16, 16), vocabulary_parallel=True), (1e15, 1e15))
    assert cut.seconds.per(Kind.HEAD)[1] == pytest.approx([4e-7, 0.0, 1e-4])
    assert cut.seconds.per(Kind.HEAD_WEIGHT)[1][0] > 0
    assert cut.ends.head_workspace_bytes(LOADS)[Kind.HEAD_WEIGHT][0] == pytest.approx(
        8 * LOADS.tokens + 2e6
    )


def test_one_stage_has_nothing_to_cut() -> None:
    with pytest.raises(ValueError, match="there is one; expected at least 2"):
        cost(pp=1, vocabulary_parallel=True)
    assert cost(pp=1).with_vocabulary(False) == cost(pp=1)
