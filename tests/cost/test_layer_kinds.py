"""Layers of several kinds: which is which, what windows see, and sums over them."""

import dataclasses
import json
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.control.routed_memory import routed_bytes
from megatron_epp.cost.analytic import profile
from megatron_epp.cost.build import even_layers, expert_degree, named_cost
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS, Model, model
from megatron_epp.cost.columns import WindowPairs
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.kinds.dsa import DSAPart
from megatron_epp.cost.kinds.layer import Layer, LayerShape
from megatron_epp.cost.layer_kinds import format_kinds, parse_kinds, stage_kinds
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.loads import pairs_before
from megatron_epp.cost.profile import Bytes, Profile, Seconds, Workspace, layer_coefficients
from megatron_epp.ir import FULL, OF_LAYERS, Chunk, Item, Kind, Plan, Span
from megatron_epp.ir.random_plan import arbitrary_plan
from megatron_epp.planner.recompute.choices import ladder
from megatron_epp.sim.play import play
from tests.cost.simple_device import SIMPLE
from tests.plans import evaluation
from tests.refusals import refusal

KINDS = {
    "dense": LayerShape(),
    "window": LayerShape(window=7),
    "experts": LayerShape(experts=8, active_experts=2, expert_hidden=40, shared_hidden=24),
    "latents": LayerShape(kv_rank=24, query_rank=20, rotary_size=8),
    "expanded": LayerShape(kv_rank=24, rotary_size=8, value_size=12),
    "sparse": LayerShape(
        kv_rank=24, query_rank=20, rotary_size=8, index_heads=6, index_size=10, chosen_keys=9
    ),
    "attention": LayerShape(mlp=False),
    "mlp": LayerShape(attention=False),
}
MODEL = Model("small", 8, 64, 176, 4, 2, 16, 1000, gated=True, kinds=KINDS, pattern=" ".join(KINDS))
PROFILE = profile(MODEL, SIMPLE)
INDEX = {
    "kv_rank": 24, "rotary_size": 8, "index_heads": 6, "index_size": 10, "chosen_keys": 9
}  # fmt: skip
WORDS = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=12)


# --- which layer is of which kind -----------------------------------------------------------------


@given(WORDS)
def test_kinds_go_to_text_and_back(word: list[str]) -> None:
    assert parse_kinds(format_kinds(word)) == tuple(word)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("3*dense 2*experts", "dense dense dense experts experts"),
        ("2*(window full) window", "window full window full window"),
        ("2*(2*a b)", "a a b a a b"),
        ("  a  b ", "a b"),
    ],
)
def test_patterns(text: str, word: str) -> None:
    assert " ".join(parse_kinds(text)) == word


@pytest.mark.parametrize(
    "bad", ["", " ", "3*", "*a", "0*a", "2*(a", "a)", "3 a", "2*((a) b)", "a,b"]
)
def test_a_bad_pattern_is_one_line(bad: str) -> None:
    with pytest.raises(
        ValueError, match=r"kinds of layers .*: expected kinds in the order"
    ) as caught:
        parse_kinds(bad)
    assert "\n" not in str(caught.value)


def test_a_pattern_of_too_many_layers_is_refused_at_once() -> None:
    for bad in ("99999*a", "99999*(9999*a)", "9999*a 9999*a"):
        with pytest.raises(ValueError, match="more than 10000 layers"):
            parse_kinds(bad)


@given(WORDS, st.integers(1, 4), st.integers(0, 2**32))
def test_layers_from_the_front(word: list[str], stages: int, seed: int) -> None:
    """A letter for the first layers of a stage is what a plan with those letters says."""
    random = Random(seed)
    stages = min(stages, len(word))
    layers = even_layers(len(word), stages)
    names = sorted(set(word))
    kinds = stage_kinds(names, [names.index(kind) for kind in word], layers)
    grid = np.array([[random.randint(0, n) for _ in range(3)] for n in layers])
    found = kinds.first("f", grid)
    edges = np.cumsum([0, *layers])
    for stage, row in enumerate(grid):
        for chunk, count in enumerate(row):
            mine = word[edges[stage] : edges[stage] + count]
            for kind, name in enumerate(kinds.names):
                there = found.get((kind, "f"), np.zeros_like(grid))[stage, chunk]
                assert there == mine.count(name)


# --- windows --------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 50))
def test_window_pairs_are_what_counting_says(position: int, window: int) -> None:
    seen = sum(1 for query in range(position) for key in range(query + 1) if query - key < window)
    assert pairs_before(position, window) == seen


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_pairs_and_tails_of_chunks(seed: int, window: int) -> None:
    random = Random(seed)
    lengths = [random.randint(1, 90) for _ in range(random.randint(1, 5))]
    plan = arbitrary_plan(lengths, (1, 1), random)
    loads = Cost(StageLayout(PROFILE.of_kind("dense"), (1,)), (1e12,)).loads(
        plan.chunks, plan.documents
    )
    kept: list[set[int]] = [set() for _ in lengths]
    for number, chunk in enumerate(plan.chunks):
        pairs = 0
        for span in chunk.spans:
            for query in range(span.start, span.stop):
                pairs += min(query + 1, window)
            for key in range(span.start):
                if key > span.start - window:  # seen from the slice's first token at least
                    kept[span.document].add(key)
        assert WindowPairs(window).of_chunks(loads)[number] == pairs
    assert loads.tail_tokens(window).tolist() == [len(rows) for rows in kept]
    assert loads.tail_tokens(0).tolist() == loads.context_tokens.tolist()
    assert loads.tail_tokens(1000).tolist() == loads.context_tokens.tolist()


# --- sums over layers -----------------------------------------------------------------------------


@st.composite
def mixed(draw: st.DrawFn) -> tuple[Cost, Plan]:
    """A cost of drawn figures, so that no two kinds are alike in any of them, and a plan for it."""
    word = tuple(draw(WORDS))
    stages = draw(st.integers(1, min(4, len(word))))
    random = Random(draw(st.integers(0, 2**32)))
    layers = even_layers(len(word), stages)

    def some(most: float = 1.0) -> float:
        return random.uniform(0.1, 1.0) * most

    figures = {}
    for kind, its in PROFILE.kinds.items():
        letters = {letter: Bytes(some(900), some(700)) for letter in its.saved_bytes}
        again = {letter: Bytes(some(900), some(700)) for letter in its.saved_bytes}
        figures[kind] = dataclasses.replace(
            layer_coefficients(its),
            saved_bytes=letters,
            recompute_workspace_bytes=again,
            weight_input_bytes=Bytes(some(300), some(300)),
            workspace_bytes={k: Workspace(some(), some(), some(), some(50)) for k in OF_LAYERS},
            forward_workspace_bytes={"f": Workspace(some(), some(), some(), some(500))},
        )
    made = dataclasses.replace(PROFILE.with_kinds(figures), host_bytes_per_second=2e9)
    zero = draw(st.sampled_from((1, 3)))
    cost = Cost(StageLayout(made, layers, 2, 4, 2, zero, 4, word), (1e15,) * stages)
    lengths = [random.randint(1, 900) for _ in range(random.randint(1, 5))]
    letters = draw(st.sampled_from(("kf", "kfmnbca", "kfo", "o")))
    plan = arbitrary_plan(lengths, layers, random, modes=letters, split_backward=0.3)
    return cost, plan


def bare(made: Profile) -> Profile:
    """Without what the ends need."""
    none = {kind: Seconds() for kind in OF_LAYERS}
    return dataclasses.replace(
        made,
        first_seconds=none,
        last_seconds=none,
        first_bytes=Bytes(),
        last_bytes=Bytes(),
        last_weight_input_bytes=Bytes(),
        last_workspace_bytes={kind: Workspace() for kind in OF_LAYERS},
        first_parameters=0.0,
        last_parameters=0.0,
    )


def layer_by_layer(both: tuple[Cost, Plan], ends: bool = False) -> tuple:
    """The cost, without ends but for ``ends``, its plan, table and loads; and by stage (kind, cost)
    of every layer as a model of that layer alone."""
    cost, plan = both
    profile = bare(cost.layout.profile)
    cost = cost if ends else cost.replace(profile=profile)
    alone = {
        kind: Cost(
            StageLayout(profile.of_kind(kind), (1,), 2, 4, 2, cost.layout.zero, 4),
            (1e15,),
        )
        for kind in set(cost.layout.layer_kinds)
    }
    word = iter(cost.layout.layer_kinds)
    stages = [[(kind, alone[kind]) for kind in islice(word, n)] for n in cost.layout.layers]
    return cost, plan, cost.table(plan), cost.loads(plan.chunks, plan.documents), stages


@given(mixed())
@settings(deadline=None)
def test_a_mixture_is_the_sum_of_its_layers(both: tuple[Cost, Plan]) -> None:
    """Grids of stages with several kinds, against one model of one layer for every layer."""
    cost, plan, table, loads, stages = layer_by_layer(both)
    near = pytest.approx
    for stage, own in enumerate(stages):
        layers, mine = len(own), [one for _, one in own]
        assert cost.memory.kv_bytes(loads)[stage] == near(
            sum(one.memory.kv_bytes(loads)[0] for one in mine), abs=layers
        )
        assert cost.memory.kv_gradient_bytes(loads)[stage] == near(
            sum(one.memory.kv_gradient_bytes(loads)[0] for one in mine), abs=layers
        )
        assert cost.memory.weight_input_bytes(loads)[stage] == near(
            sum(one.memory.weight_input_bytes(loads)[0] for one in mine), abs=layers
        )
        if cost.layout.zero == 1:
            states = sum(one.memory.states_bytes[0] for one in mine)
            assert cost.memory.states_bytes[stage] == near(states, abs=layers)
        for chunk, choice in enumerate(plan.recompute[stage]):
            again, held, copies = 0.0, 0.0, 0.0
            for one, letter in zip(mine, choice, strict=True):
                if letter == "o":
                    copies += one.memory.copy_seconds(loads)[chunk]
                else:
                    again += one.seconds.recompute((0, letter), loads)[chunk]
                    held += one.memory.saved_bytes((0, letter), loads)[chunk]
            assert table.held_bytes[Item.ACTIVATIONS][stage][chunk] == near(held, abs=1.01)
            assert table.recompute_seconds[stage][chunk] == near(again)
            for kind in OF_LAYERS:
                seconds = sum(one.seconds.of(kind, loads)[0, chunk] for one in mine)
                if kind is not Kind.WEIGHT:
                    work = seconds + (again if kind is not Kind.FORWARD else 0.0)
                    seconds += max(0.0, copies - work)
                assert table.seconds[kind][stage][chunk] == near(seconds)


@given(mixed())
@settings(deadline=None)
def test_peaks_of_a_mixture_one_layer_at_a_time(both: tuple[Cost, Plan]) -> None:
    """While a layer runs, what it recomputes lives beside what it held, and the last stage frees
    what its end holds first; offloaded layers hold nothing, but two of them are there all along."""
    cost, plan, table, loads, stages = layer_by_layer(both, ends=True)
    made_up = cost.layout.profile
    for stage, own in enumerate(stages):
        names, mine = zip(*own, strict=True)
        end = 1 / 8 if stage == plan.stages - 1 else 0.0
        for chunk, choice in enumerate(plan.recompute[stage]):
            last = loads.document[chunk] >= 0 and loads.later[chunk] < 0
            document = max(0, loads.document[chunk])

            def made(one: Cost) -> float:
                one_layer = one.memory.layer_kv_gradient_bytes(one.layout.coefficients[0], loads)
                return float(one_layer[document]) if last else 0.0  # noqa: B023

            def works(one: Cost) -> float:
                return float(one.memory.workspace_bytes(Kind.BACKWARD, loads)[0, chunk])  # noqa: B023

            # Wherever they stand, their gradients count from the start, kind by kind.
            numbers = map(cost.layout.kinds.names.index, names)
            offloaded = [
                one
                for _, one, letter in sorted(
                    zip(numbers, mine, choice, strict=True), key=lambda each: each[0]
                )
                if letter == "o"
            ]
            rows = loads.tokens[chunk], loads.cached_tokens(made_up.stores_last_slice)[chunk]
            begins = offloaded[0] if offloaded else mine[-1]
            held, peak = -end * made_up.last_bytes(*rows), works(begins)
            for one in offloaded:
                held += made(one)
                peak = max(peak, held + works(one))
            for one, letter in reversed(list(zip(mine, choice, strict=True))):
                if letter == "o":
                    continue
                alive = 0.0
                if letter != "k":
                    alive = one.memory.recompute_workspace_bytes((0, letter), loads)[chunk]
                peak = max(peak, held + alive + works(one))
                held += made(one) - one.memory.saved_bytes((0, letter), loads)[chunk]
                peak = max(peak, held + works(one))
            peak -= sum(map(made, mine))
            peak += end * made_up.last_workspace_bytes[Kind.BACKWARD](*rows)
            aside = 0.0
            if offloaded:
                largest = max(one.memory.saved_bytes((0, "k"), loads)[chunk] for one in offloaded)
                aside = min(2, len(offloaded)) * largest
            assert table.workspace_bytes[Kind.BACKWARD][stage][chunk] == pytest.approx(
                peak + aside, abs=6
            )
            forward = max(
                one.memory.forward_workspace_bytes(
                    loads, {(0, letter): np.ones((1, loads.chunks))}
                )[0, chunk]
                for one, letter in zip(mine, choice, strict=True)
            )
            forward += end * made_up.last_workspace_bytes[Kind.FORWARD](*rows)
            assert table.workspace_bytes[Kind.FORWARD][stage][chunk] == pytest.approx(
                forward + aside, abs=2
            )


@given(mixed())
@settings(deadline=None)
def test_counts_by_kind_say_what_the_plan_says(both: tuple[Cost, Plan]) -> None:
    """For plans whose layers of every kind stand in the order of the counts."""
    cost, plan = both
    order = "fmnbcako"
    kinds, texts = cost.layout.kinds, []
    for stage, word in enumerate(kinds.words):
        row = []
        for choice in plan.recompute[stage]:
            layers = sorted(
                zip(choice, word.tolist(), strict=True), key=lambda x: order.index(x[0])
            )
            waiting = {
                kind: iter([x for x, k in layers if k == kind]) for kind in set(word.tolist())
            }
            row.append("".join(next(waiting[kind]) for kind in word.tolist()))
        texts.append(tuple(row))
    plan = dataclasses.replace(plan, recompute=tuple(texts))
    counts = kinds.of_plan(plan)
    counts = {choice: counts[choice] for choice in sorted(counts, key=lambda c: order.index(c[1]))}
    told, read = cost.table_of(cost.loads(plan.chunks, plan.documents), counts), cost.table(plan)
    for name in ("seconds", "comm_seconds", "held_bytes", "workspace_bytes"):
        for key, grid in getattr(read, name).items():
            assert np.allclose(getattr(told, name)[key], grid, rtol=1e-12, atol=1.01), (name, key)
    assert np.allclose(told.recompute_seconds, read.recompute_seconds, rtol=1e-12)


@given(mixed())
@settings(deadline=None)
def test_ledgers_end_at_zero(both: tuple[Cost, Plan]) -> None:
    """Bytes are whole, so sums are exact: nothing is left, whatever was made."""
    cost, plan = both
    for each in (plan, evaluation(plan)):
        table = cost.table(each)
        for grid in (*table.held_bytes.values(), *table.workspace_bytes.values()):
            assert (np.asarray(grid) == np.rint(grid)).all()
        played = play(each, table)
        assert played.left_bytes == (0.0,) * plan.stages
        assert min(played.peak_bytes) >= 0
        assert 0 <= played.bubble_ratio < 1
        assert 0 <= played.recompute_ratio + played.comm_ratio <= 1


# --- what a cost refuses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "error"),
    [
        ((), "the cost model has layers of the kinds dense, window, "),
        (("dense", "dens"), "layers of kind 'dens': the cost model knows dense, window, "),
        (("dense",) * 3, "kinds of layers '3*dense': of 3 layers, but the stages have 2"),
    ],
)
def test_which_layer_is_which_must_be_said(kinds: tuple[str, ...], error: str) -> None:
    with pytest.raises(ValueError) as caught:
        Cost(StageLayout(PROFILE, (1, 1), layer_kinds=kinds), (1e12,) * 2)
    assert str(caught.value).startswith(error)


@pytest.mark.parametrize(
    ("ep", "experts", "error"),
    [
        (3, 12, "ep 3: expected a divisor of tp x cp, 8, or a multiple of it whose share divides "),
        (16, 12, "ep 16: expected a divisor of tp x cp, 8, or a multiple of it whose share "),
        (8, 12, "ep 8: expected a divisor of the 12 experts"),
        (2, 0, "ep 2: the model has no experts; leave it out"),
    ],
)
def test_expert_degrees(ep: int, experts: int, error: str) -> None:
    assert expert_degree(None, 4, 2, experts) == (4 if experts else 1)
    assert expert_degree(4, 4, 2, 12) == 4 and expert_degree(None, 4, 2, None) == 8
    assert expert_degree(16, 4, 2, 16, dp=4) == 16  # of two replicas each
    with pytest.raises(ValueError) as caught:
        expert_degree(ep, 4, 2, experts)
    assert str(caught.value).startswith(error)


def test_sparse_attention_has_no_context_parallel_ranks(tmp_path: Path) -> None:
    described = model_file(tmp_path, kinds={"local": INDEX, "far": {}})
    with pytest.raises(ValueError, match=r"^cp 2: expected 1, as the model has sparse attention"):
        named_cost(described, "h200-141g", pp=2, cp=2)
    assert named_cost(described, "h200-141g", pp=2).layout.layers == (2, 2)


def test_exchanges_and_states_by_expert_degree() -> None:
    """2 x k x hidden elements a token go there and back, what stays on the device not; a layer's
    experts and their optimizer are shared."""
    at = {ep: named_cost("qwen3-30b-a3b", "h200-141g", pp=4, tp=2, cp=4, ep=ep) for ep in (1, 2, 8)}
    token = 2 * 2 * 8 * 2048
    rates = at[1].layout.profile.all_to_all_bytes_per_second
    for ep in (2, 8):
        more = at[ep].seconds.communication_per(Kind.FORWARD) - at[1].seconds.communication_per(
            Kind.FORWARD
        )
        assert more[1, 0] == pytest.approx(12 * token * (ep - 1) / ep / 8 / rates[ep])
        assert (more[:, 1:] == 0).all()
        fewer = at[1].memory.states_bytes[1] - at[ep].memory.states_bytes[1]
        experts = 12 * 128 * 3 * 2048 * 768
        assert fewer == pytest.approx(6 * experts * (1 - 1 / ep), abs=4)


# --- models ---------------------------------------------------------------------------------------

# Published: the makers' own counts, in billions; of Gemma 3 without its eyes.
PUBLISHED = {
    "gpt-7b": 7.5, "gpt-13b": 13.9, "gpt-30b": 33.6, "llama3-8b": 8.03, "llama3-70b": 70.6,
    "qwen3-8b": 8.2, "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.0, "deepseek-v3": 671.0, "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8, "gemma3-27b": 27.0, "nemotron-h-8b": 8.1, "nemotron-3-nano": 31.6,
    "nemotron-3-super": 120.6, "qwen3-next-80b": 79.7,
}  # fmt: skip
# Of which a token meets, embedding and output layer as the makers count them.
ACTIVE = {"qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22.0, "deepseek-v3": 37.0, "gpt-oss-120b": 5.1,
          "nemotron-3-nano": 3.6}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    known = model(name)
    assert known.parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)
    met = sum(known.shapes[kind].active_parameters for kind in known.layer_kinds)
    ends = known.vocabulary_parameters * (1 if name.startswith("gpt-oss") else 2)
    if name in ACTIVE:
        assert (met + ends) / 1e9 == pytest.approx(ACTIVE[name], rel=0.03)


def test_layers_with_a_state_by_hand() -> None:
    """A projection to values, gates, keys and time steps, one back, taps and norms; the scan's
    pairs within a block of 128, and its state."""
    mamba = model("nemotron-h-8b").shapes["mamba"]
    products = 4096 * (2 * 8192 + 2 * 1024 + 128) + 8192 * 4096
    vectors = 4 * (8192 + 2 * 1024) + 8192 + 4096
    assert mamba.parameters == products + vectors
    scan = 128 * (1024 + 8192) + 4 * 8192 * 128
    assert mamba.flops_per_token == 2 * mamba.parameters + scan and mamba.flops_per_pair == 0
    found = profile(MODELS["nemotron-h-8b"], DEVICES["h100-80g"]).kinds["mamba"]
    assert found.border_bytes == 4 * 2**20 + 60 * 2**10  # float32 state, bf16 rows
    assert found.border_gradient_bytes == 4 * 2**20 + 120 * 2**10  # all of it float32
    assert found.kv_bytes_per_token == 0
    assert found.layer_seconds[Kind.FORWARD].per_pair == 0
    delta = model("qwen3-next-80b").shapes["delta"]
    assert delta.carried.state * 4 == 2 * 2**20 and delta.carried.tail * 2 == 48 * 2**10


def test_flops_by_hand() -> None:
    """Linears 2 x parameters, pairs QK' and PV, in each of the shapes."""
    qwen = model("qwen3-30b-a3b").shapes["experts"]
    attention = 2048 * (32 + 4 + 4 + 32) * 128
    experts = 8 * 3 * 2048 * 768 + 2048 * 128  # and the router
    assert qwen.flops_per_token == 2 * (attention + experts + 2 * 2048)
    assert qwen.flops_per_pair == 4 * 32 * 128
    narrow = Layer.of(qwen.model, dataclasses.replace(qwen.shape, expert_latent=512))
    routed = 8 * 3 * 512 * 768 + 2048 * 128 + 2 * 2048 * 512  # both projections
    assert narrow.flops_per_token == 2 * (attention + routed + 2 * 2048)
    assert narrow.routed.exchanged == 8 * 512 and qwen.routed.exchanged == 8 * 2048
    assert qwen.saved - narrow.saved == 8 * (2048 - 512) - 512
    deepseek = model("deepseek-v3").shapes["experts"]
    queries = 7168 * 1536 + 1536 + 1536 * 128 * 192
    latents = 7168 * (512 + 64) + 512
    up, out = 512 * 128 * (128 + 128), 128 * 128 * 7168
    mlp = 9 * 3 * 7168 * 2048 + 7168 * 256
    assert deepseek.flops_per_token == 2 * (queries + latents + up + out + mlp + 2 * 7168)
    assert deepseek.flops_per_pair == 2 * 128 * (192 + 128)
    assert not deepseek.work
    window = model("gpt-oss-120b").shapes["window"]
    assert window.flops_per_pair == 4 * 64 * 64
    assert window.flops_per_token == 2 * (
        2880 * 64 * (64 + 8 + 8 + 64) + 4 * 3 * 2880 * 2880 + 2880 * 128 + 2 * 2880
    )
    gemma = model("gemma3-27b")
    assert gemma.layer_kinds.count("full") == 10 and gemma.layer_kinds[:6] == (
        *("window",) * 5, "full",
    )  # fmt: skip
    assert gemma.shapes["full"].flops_per_token == 2 * (
        5376 * 128 * (32 + 16 + 16 + 32) + 3 * 5376 * 21504 + 2 * 5376
    )


def test_what_later_slices_get() -> None:
    """Of DeepSeek-V3: 81,920 bytes a token of K and V; with an indexer, 1,152 of the latent and 256
    of the indexer's key, on every device."""
    shape = model("deepseek-v3")
    experts = shape.kinds["experts"]
    sparse = dataclasses.replace(experts, index_heads=64, index_size=128, chosen_keys=2048)
    both = dataclasses.replace(shape, kinds={**shape.kinds, "experts": sparse})
    expanded, latent = (profile(one, DEVICES["h100-80g"]).kinds["experts"] for one in (shape, both))
    assert expanded.kv_bytes_per_token == 81_920 and not expanded.kv_replicated
    assert expanded.kv_gradient_bytes_per_token == 163_840
    assert latent.kv_bytes_per_token == 1152 + 256 and latent.kv_replicated


def test_a_choice_of_keys_is_paid_by_the_indexer_for_all_and_by_attention_for_the_chosen() -> None:
    shape = KINDS["sparse"]
    taught = dataclasses.replace(shape, taught_on_all=True)
    part, of_all = (Layer.of(MODEL, one).parts[DSAPart] for one in (shape, taught))
    assert part.flops_per_pair == 2 * (6 * 10 + 6)
    assert of_all.flops_per_pair == part.flops_per_pair + 2 * 4 * (24 + 8)
    assert part.work[WindowPairs(9)].flops == 2 * 4 * (24 + 8 + 24)
    latents = Layer.of(MODEL, KINDS["latents"]).parameters
    indexer = 20 * 60 + 64 * 10 + 2 * 10 + 64 * 6
    assert Layer.of(MODEL, shape).parameters == latents + indexer
    assert part.carried.channels == 24 + 8 + 10 and not part.carried.heads

    made = bare(PROFILE.of_kind("sparse"))
    cost = Cost(StageLayout(made, (1,)), (1e15,))
    chunks = [Chunk((Span(0, 0, 30),)), Chunk((Span(0, 30, 70), Span(1, 0, 5)))]
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        of, found = made.layer_seconds[kind], cost.seconds.of(kind, cost.loads(chunks, (70, 5)))[0]
        for rows, seconds in ((range(1, 31), found[0]), ([*range(31, 71), *range(1, 6)], found[1])):
            chosen = made.column_seconds[WindowPairs(9)][kind] * sum(min(row, 9) for row in rows)
            assert seconds == pytest.approx(of(len(rows), sum(rows)) + chosen)
    again = cost.seconds.recompute((0, FULL), cost.loads(chunks, (70, 5)))
    assert again == pytest.approx(cost.seconds.of(Kind.FORWARD, cost.loads(chunks, (70, 5)))[0])
    # A column that no layer has is no column of the cost; one that a layer has counts in bounds.
    assert cost.layout.columns.extra == (WindowPairs(9),)
    none = Cost(StageLayout(PROFILE.of_kind("dense"), (1,)), (1e15,))
    assert none.layout.columns.extra == ()
    bound = cost.layout.columns.batch_features(np.array([4, 20]), 2.0)
    assert bound.tolist()[2:] == [2.0, 4 * 5 / 2 + 9 * 10 / 2 + 9 * 11]


def test_layers_with_half_of_it() -> None:
    """An attention layer and an MLP layer hold, compute and move what a whole layer does, together;
    but there is a layer input and a launch for each."""
    shapes = {"whole": LayerShape(), "attention": KINDS["attention"], "mlp": KINDS["mlp"]}
    several = Model("m", 3, 64, 176, 4, 2, 16, 1000, gated=True, kinds=shapes,
                    pattern="whole attention mlp")  # fmt: skip
    of = profile(several, DEVICES["h100-80g"]).kinds
    whole, halves = of["whole"], (of["attention"], of["mlp"])
    for name in ("layer_parameters", "tensor_bytes_per_token", "all_to_all_bytes_per_token",
                 "kv_bytes_per_token"):  # fmt: skip
        assert getattr(whole, name) == sum(getattr(half, name) for half in halves), name
    for kind in OF_LAYERS:
        whole_F, *parts = (each.layer_seconds[kind] for each in (whole, *halves))
        assert whole_F.per_token == pytest.approx(sum(part.per_token for part in parts))
        assert whole_F.per_pair == sum(part.per_pair for part in parts)
    for letter in "kmnb":
        parts = [half.saved_bytes[letter].per_token for half in halves]
        assert whole.saved_bytes[letter].per_token == sum(parts), letter
    weights = [half.weight_input_bytes.per_token for half in halves]
    assert whole.weight_input_bytes.per_token == sum(weights)
    # What a layer has not takes nothing to run again, no launch either.
    again = [half.recompute_seconds for half in halves]
    for letter, mine in (("m", again[1]), ("c", again[0])):
        (other,) = (each for each in again if each is not mine)
        assert other[letter] == Seconds() and mine[letter] != Seconds()
    assert again[0]["b"] == again[0]["n"]  # MLP and norms of attention: its norm


def model_file(tmp_path, **change) -> str:
    plain = Model("mine", 4, 64, 128, 4, 2, 16, 100, gated=True)
    kinds = {"kinds": {"local": {"window": 128}, "far": {}}, "pattern": "2*(local far)"}
    shape = {**dataclasses.asdict(plain), **kinds}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**shape, **change}))
    return str(path)


def test_a_model_of_several_kinds_of_ones_own(tmp_path) -> None:
    found = model(model_file(tmp_path))
    assert found.layer_kinds == ("local", "far") * 2
    assert found.shapes["local"].shape == LayerShape(window=128)
    cost = named_cost(model_file(tmp_path), "h100-80g", pp=2)
    assert (
        cost.layout.kinds.names == ("local", "far")
        and cost.layout.kinds.counts.tolist() == [[1, 1]] * 2
    )
    experts = {"experts": 4, "active_experts": 1, "expert_hidden": 9}
    alone = model(model_file(tmp_path, kinds={"far": experts}, pattern=""))
    assert alone.layer_kinds == ("far",) * 4 and alone.most_experts == 4


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"layers": 0}, "layers 0: expected a whole number of at least 1"),
        ({"layers": "6"}, "layers '6': expected a whole number"),
        ({"kv_heads": 5}, "kv_heads 5: expected a divisor of heads, 4"),
        ({"gated": 1}, "gated 1: expected true or false"),
        ({"hiden": 5}, "unknown field 'hiden'; did you mean hidden?"),
        ({"pattern": ""}, "pattern is missing: expected which layer is of which kind"),
        ({"pattern": "3*far"}, "pattern '3*far': of 3 layers; expected 4"),
        ({"pattern": "4*near"}, "pattern: 'near' is not one of the kinds, local, far"),
        ({"pattern": "4*"}, "kinds of layers '4*': expected kinds in the order of the layers"),
        ({"pattern": 4}, "pattern 4: expected a text"),
        ({"kinds": {}}, "pattern '2*(local far)': expected kinds with it"),
        ({"kinds": []}, "kinds: expected an object from a kind's name to its sizes"),
        ({"kinds": {"a b": {}}}, "kinds: 'a b': expected a word of letters, digits"),
        ({"kinds": {"far": 3}}, "kinds: far: expected a JSON object"),
        ({"kinds": {"far": {"windw": 3}}}, "kinds: far: unknown field 'windw'; did you mean windo"),
        ({"kinds": {"far": {"window": -1}}}, "kinds: far: window -1: expected a whole number of a"),
        ({"kinds": {"far": {**INDEX, "index_size": 2}}}, "kinds: far: index_size 2: expected at "),
        ({"kinds": {"far": {**INDEX, "window": 9}}}, "kinds: far: window 9: expected 0 with "),
        ({"kinds": {"far": {"kv_rank": 4, "carries_latents": True}}}, "kinds: far: unknown field"),
        ({"kinds": {"far": {"window": 10**12}}}, "kinds: far: window 1000000000000: expected at m"),
        ({"kinds": {"far": {"attention": 1}}}, "kinds: far: attention 1: expected true or false"),
        ({"kinds": {"far": {"attention": False, "mlp": False}}}, "kinds: far: attention false, ml"),
        ({"kinds": {"far": {"experts": 4}}}, "kinds: far: active_experts 0: expected 1 to 4, the "),
        ({"kinds": {"far": {"experts": 4, "active_experts": 5}}}, "kinds: far: active_experts 5: "),
        ({"kinds": {"far": {"experts": 4, "active_experts": 2}}}, "kinds: far: expert_hidden 0: "),
        ({"kinds": {"far": {"expert_hidden": 4}}}, "kinds: far: expert_hidden 4: expected experts"),
        ({"kinds": {"far": {"expert_latent": 4}}}, "kinds: far: expert_latent 4: expected experts"),
        (
            {"kinds": {"far": {"rotary_size": 4}}},
            "kinds: far: rotary_size 4: expected kv_rank with it",
        ),
        ({"kinds": {"far": {"attention": False, "window": 4}}}, "kinds: far: attention false: win"),
        ({"kinds": {"far": {"mlp": False, "ffn_hidden": 4}}}, "kinds: far: mlp false: experts and"),
    ],
)  # fmt: skip
def test_a_bad_model_file_is_one_line(tmp_path, change: dict, error: str) -> None:
    path = model_file(tmp_path, **change)
    assert refusal(ValueError, model, path).startswith(f"model file {path}: {error}")


# --- profiles -------------------------------------------------------------------------------------


def test_profiles_of_several_kinds_go_to_text_and_back(tmp_path) -> None:
    assert Profile.from_json(PROFILE.to_json()) == PROFILE
    assert list(PROFILE.kinds) == list(KINDS)
    for kind, figures in PROFILE.kinds.items():
        alone = PROFILE.of_kind(kind)
        assert layer_coefficients(alone) == layer_coefficients(figures)
        assert list(alone.kinds) == [kind]
    again = PROFILE.of_kind("mlp").with_kinds(PROFILE.kinds)
    assert again == PROFILE


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('"profile": 5', '"profile": 4', "version 4; this program reads 5: measure again"),
        ('"profile": 5', '"version": 3', "expected an object with 'profile': 5"),
        ('"alltoall"', '"allgather"', "token_dispatcher 'allgather': expected"),
        ('"tp": 1', '"tp": 0', "tp: 0: expected a whole number of at least 1"),
        ('"tp": 1,', "", "lacks tp"),
        ('"tp": 1', '"tq": 1, "tp": 1', "unknown 'tq'"),
        ('"per_pair"', '"per_par"', "layer_seconds: expected an object with per_chunk, per_pair"),
        ('"F": {', '"G": {', "expected an object with F, B, I, W"),
        ('"kv_bytes_per_token": ', '"kv_bytes_per_token": -', "expected a number of at least 0"),
        ('"kv_bytes_per_token": ', '"kv_bytes_per_token": 1e999, "x": ', "unknown 'x'"),
        (
            '"stores_last_slice": false',
            '"stores_last_slice": 0',
            "stores_last_slice: 0: expected true or false",
        ),
        ('"2":', '"two":', "expected an object from degree to bytes per second"),
        ("{", "", "no JSON"),
        ('"window": 7', '"window": 7.5', "other_kinds: window: window: 7.5: expected a whole numb"),
        ('"window": 7', '"windw": 7', "other_kinds: window: unknown 'windw'"),
        ('"other_kinds": {', '"other_kinds": {"a b": {},', "other_kinds: 'a b': expected a word"),
        ('"other_kinds": {', '"other_kinds": {"a": {},', "other_kinds: a: lacks all_to_all_bytes_"),
        ('"layer_kind": "dense"', '"layer_kind": "mlp"', "other_kinds: mlp is the name of the fir"),
        ('"kind": "analytic"', '"kind": "guess"', "provenance: kind 'guess': expected measured or"),
        ('"context_seconds": {}', '"context_seconds": {"X": 1}', "expected an object with some "),
        ('"kv_replicated": true', '"kv_replicated": 1', "kv_replicated: 1: expected true or false"),
    ],
)  # fmt: skip
def test_a_bad_profile_is_one_line(old: str, new: str, error: str) -> None:
    text = PROFILE.to_json()
    assert old in text
    told = refusal(ValueError, Profile.from_json, text.replace(old, new, 1), "p.json")
    assert told.startswith("profile file p.json: ") and error in told


# --- what a recomputed layer's forward needs ------------------------------------------------------


def test_a_recomputed_layers_forward_is_promised_what_it_needs() -> None:
    """Per letter where that is known; else what a kept layer needs, as before."""
    made = profile(MODELS["llama3-8b"], DEVICES["h100-80g"])
    kept, full = Workspace(3.0, 3.0, 0.0, 10.0), Workspace(40.0, 40.0, 0.0, 100.0)
    known = dataclasses.replace(
        made,
        workspace_bytes={**made.workspace_bytes, Kind.FORWARD: kept},
        forward_workspace_bytes={"f": full},
        last_workspace_bytes=dict.fromkeys(made.last_workspace_bytes, Workspace()),
    )
    chunks = [Chunk.parse(["0[0:500]"]), Chunk.parse(["1[0:100]"])]
    for per_letter, in_full in ((known, 40 * 100 + 100), (
        dataclasses.replace(known, forward_workspace_bytes={}), 3 * 100 + 10
    )):  # fmt: skip
        cost = Cost(StageLayout(per_letter, (2, 2)), (1e12,) * 2)
        loads = cost.loads(chunks, (500, 100))
        counts = {
            (0, "f"): np.array([[0.0, 1.0], [0.0, 0.0]]),
            (0, "k"): np.array([[2.0, 1.0], [2.0, 2.0]]),
        }
        found = cost.table_of(loads, counts).workspace_bytes[Kind.FORWARD]
        assert found[0].tolist() == [3 * 500 + 10, in_full]
        assert found[1].tolist() == [3 * 500 + 10, 3 * 100 + 10]
    assert Profile.from_json(known.to_json()) == known


def test_the_model_file_of_the_docs(tmp_path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how" / "cost_model.md").read_text()
    start = text.index('    {"name": "mine"')
    path = tmp_path / "mine.json"
    path.write_text(text[start : text.index("\n\n", start)])
    found = model(str(path))
    assert format_kinds(found.layer_kinds) == "3*local far local far 2*experts"
    assert named_cost(str(path), "h100-80g", pp=2, tp=4).layout.ep == 4
    fields = {field.name for field in dataclasses.fields(LayerShape)}
    assert all(f"`{name}`" in text for name in fields), fields


def test_only_experts_have_an_activation_of_their_own_to_recompute() -> None:
    for kind, figures in PROFILE.kinds.items():
        freed = figures.saved_bytes["k"].per_token - figures.saved_bytes["e"].per_token
        assert freed == (2 * 2 * 40 if kind == "experts" else 0), kind
        assert (figures.recompute_seconds["e"] != Seconds()) is (kind == "experts")


# ------------------------------------------------------------------ memory that routing decides


def test_the_fullest_devices_experts_hold_more() -> None:
    """Their part of the memory alone, wherever it lives: from F to B, or while B makes it again."""
    model = MODELS["qwen3-30b-a3b"]
    shape = dataclasses.replace(model, layers=4, pattern="4*experts")
    cost = Cost(StageLayout(profile(shape, DEVICES["h100-80g"]), (4,), tp=4, ep=4), (1e15,))
    fuller = cost.replace(profile=dataclasses.replace(cost.layout.profile, routing=2.0))
    loads = cost.loads([Chunk((Span(0, 0, 4096),))], [4096])
    inside = cost.memory.saved_bytes((0, "k"), loads) - cost.memory.saved_bytes((0, "m"), loads)
    for letter in "kcna":
        grown = fuller.memory.saved_bytes((0, letter), loads) - cost.memory.saved_bytes(
            (0, letter), loads
        )
        assert grown == pytest.approx(inside), letter
        again = fuller.memory.recompute_workspace_bytes((0, letter), loads)
        assert again == cost.memory.recompute_workspace_bytes((0, letter), loads), letter
    for letter in "fmb":
        assert fuller.memory.saved_bytes((0, letter), loads) == cost.memory.saved_bytes(
            (0, letter), loads
        ), letter
        grown = fuller.memory.recompute_workspace_bytes((0, letter), loads)
        assert grown - cost.memory.recompute_workspace_bytes((0, letter), loads) == pytest.approx(
            inside, abs=1
        )
    alone = fuller.replace(ep=1)
    assert alone.memory.saved_bytes((0, "k"), loads) == cost.memory.saved_bytes((0, "k"), loads)
    # What one more even share would add to a plan's peak, and back again as text.
    plan = Plan.parse(
        "plan v1\ndocuments 4096\nlayers 4\nchunk 0: 0[0:4096]\nrecompute 0: 1f3k\nstage 0: F0 B0\n"
    )
    (grown,) = routed_bytes(cost, (plan,))
    assert grown == pytest.approx(float(3 * inside[0]), rel=0.4) and grown > 0
    assert Profile.from_json(fuller.layout.profile.to_json()) == fuller.layout.profile
    with pytest.raises(ValueError, match=r"routing: 0\.5: expected a number of at least 1"):
        Profile.from_json(
            fuller.layout.profile.to_json().replace('"routing": 2.0', '"routing": 0.5')
        )


def test_only_latents_have_an_up_projection_to_recompute() -> None:
    """DeepSeek-V3: 98,304 bytes a token of Q and K, and 32,768 of V, for a tenth of the
    forward; of slices whose K and V lie in the store, Q alone."""
    shape = dataclasses.replace(model("deepseek-v3"), layers=2, pattern="2*dense")
    queries, keys, values = 2 * 128 * 192, 2 * 128 * 192, 2 * 128 * 128
    made = profile(shape, SIMPLE)
    kept, again = made.saved_bytes["k"], made.saved_bytes["u"]
    assert kept.per_token - again.per_token == queries + keys + values
    assert kept.per_cut_token - again.per_cut_token == queries
    share = (1536 * 128 * 192 + 512 * 128 * 256) / shape.shapes["dense"].active_parameters
    forward = made.layer_seconds[Kind.FORWARD].per_token
    assert made.recompute_seconds["u"].per_token == pytest.approx(share * forward)
    cost = Cost(StageLayout(made, (1, 1)), (1e15,) * 2)
    assert "u" in ladder(cost, cost.loads([Chunk((Span(0, 0, 4096),))], [4096]))
    plain = profile(MODELS["llama3-8b"], DEVICES["h100-80g"])
    assert plain.saved_bytes["u"] == plain.saved_bytes["k"]
    assert plain.recompute_seconds["u"] == Seconds()
