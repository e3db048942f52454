"""Every kind of layer is measured alone, by the ranks that have it: made-up layers, found again."""

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.catalogue.devices import device
from megatron_epp.cost.catalogue.models import MODELS, Model
from megatron_epp.cost.columns import DIAGONALS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.fitting.measured import _host_seconds as fitted_host_seconds
from megatron_epp.cost.fitting.readings import Readings
from megatron_epp.cost.kinds.layer import LayerShape
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import MEASURED, Profile, Provenance, Seconds
from megatron_epp.ir import FULL, KEEP, Chunk, Kind, Span
from megatron_epp.mcore.calibrate import clocks, measure, profile_file
from megatron_epp.mcore.calibrate.clocks import IssueClock
from megatron_epp.mcore.calibrate.measure import calibrate
from megatron_epp.mcore.calibrate.probe import Measurement, Shape
from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.mcore.model import shape as shape_module

ORIGIN = Provenance("made up", "cpu: none", "float32", "2026-11-22", MEASURED, MEASURED)
# Of a layer: forward seconds per token, per pair that its window leaves, per chunk; its window;
# bytes per token from F to B.
RULES = {"local": (2e-6, 4e-9, 1e-4, 100, 700.0), "far": (3e-6, 2e-9, 2e-4, 0, 500.0)}


class MadeUpLayers:
    """A stage with both ends, whose layers take what RULES say. ``runs`` counts layers by kind.

    On a rested device (``pace`` below 1) everything takes less.
    """

    first, last, head_tokens, stores_last_slice = True, True, 0, False
    fused_head, computes_alone = True, False
    device = torch.device("cpu")
    config = SimpleNamespace(
        tensor_model_parallel_size=1, context_parallel_size=1, kv_channels=16, num_query_groups=2,
        params_dtype=torch.float32,
    )  # fmt: skip

    def __init__(
        self, word: tuple[str, ...], at: int = 0, runs: list[str] | None = None, pace: float = 0.8
    ):
        self.word, self.at, self.pace = word, at, pace
        self.runs: list[str] = [] if runs is None else runs
        self.modules = {"mlp": (None,), "layernorm": (None, None)}

    def of_layer(self, at: int) -> "MadeUpLayers":
        return type(self)(self.word, at, self.runs)

    def after_work(self, shape: Shape, repeats: int = 1) -> "MadeUpLayers":
        return type(self)(self.word, self.at, self.runs, 1.0)

    def layers(self, shape: Shape, letters: str, weigh: bool = False, split: bool = False):
        kind = self.word[self.at]
        self.runs.append(kind)
        token, pair, chunk, window, held = RULES[kind]
        seconds = token * shape.tokens + pair * shape.pairs_within(window) + chunk
        seconds, token = seconds * self.pace, token * self.pace
        again = seconds if letters == FULL else 0.0
        kept = 64.0 if letters == FULL else held
        return Measurement(
            seconds, 2 * seconds + again, round(kept * shape.tokens),
            weight_seconds=token * shape.tokens if split else 0.0,
        )  # fmt: skip

    def embedding(self, shape: Shape, weigh: bool = False) -> Measurement:
        return Measurement(
            self.pace * 1e-7 * shape.tokens, self.pace * 2e-7 * shape.tokens, shape.tokens
        )

    def ends(self, shape: Shape, weigh: bool = False, split: bool = False) -> Measurement:
        return Measurement(
            self.pace * 5e-7 * shape.tokens, self.pace * 1e-6 * shape.tokens, 8 * shape.tokens
        )

    def module_seconds(self, shape: Shape, module) -> float:
        return self.pace * 1e-7 * shape.tokens * (1 + len(self.word[self.at]))


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield SimpleNamespace(control=dist.group.WORLD, pipeline_size=1, pipeline_rank=0, replica=0)
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def copies(monkeypatch) -> None:
    """What the host's memory is worth has nothing to do with layers."""
    monkeypatch.setattr(measure, "host_rate", lambda probe, groups: 1e9)


def shaped(word: tuple[str, ...]) -> Model:
    kinds = {kind: LayerShape(window=RULES[kind][3]) for kind in sorted(set(word))}
    return Model("m", len(word), 64, 128, 4, 2, 16, 1000, kinds=kinds, pattern=" ".join(word))


def measured(groups, word: tuple[str, ...], layers=MadeUpLayers, split: bool = False) -> Profile:
    return calibrate([layers(word)], groups, shaped(word), 65536, ORIGIN, split, [word])


def test_a_rank_with_several_stages_measures_a_kind_once(groups) -> None:
    """By the first of its stages that has it, and each end by the stage that has it."""

    class Stage(MadeUpLayers):
        def __init__(self, word: tuple[str, ...], first: bool = False, last: bool = False):
            super().__init__(word)
            self.first, self.last, self.ran = first, last, []

        def of_layer(self, at: int) -> MadeUpLayers:
            return MadeUpLayers(self.word, at, self.runs)

        def after_work(self, shape: Shape, repeats: int = 1) -> "Stage":
            other = Stage(self.word, self.first, self.last)
            other.ran, other.runs, other.pace = self.ran, self.runs, 1.0
            return other

        def embedding(self, shape: Shape, weigh: bool = False) -> Measurement:
            assert self.first
            self.ran.append("embedding")
            return super().embedding(shape, weigh)

        def ends(self, shape: Shape, weigh: bool = False, split: bool = False) -> Measurement:
            assert self.last
            self.ran.append("head")
            return super().ends(shape, weigh, split)

    word = ("local", "local", "far", "local", "far")
    stages = [Stage(word[:2], first=True), Stage(word[2:4]), Stage(word[4:], last=True)]
    kinds = [stage.word for stage in stages]
    made = calibrate(stages, groups, shaped(word), 65536, ORIGIN, False, kinds)
    assert [set(stage.runs) for stage in stages] == [{"local"}, {"far"}, set()]
    assert [set(stage.ran) for stage in stages] == [{"embedding"}, set(), {"head"}]
    assert list(made.kinds) == ["local", "far"] and made.provenance.kind == MEASURED
    assert made.provenance.source.count("seconds of F") == 2
    for kind, figures in made.kinds.items():
        token, pair, chunk, window, held = RULES[kind]
        forward = figures.layer_seconds[Kind.FORWARD]
        assert figures.window == window
        assert forward.per_token == pytest.approx(token, rel=0.02)
        assert forward.per_pair == pytest.approx(pair, rel=0.02)
        assert forward.per_chunk == pytest.approx(chunk, rel=0.05)
        assert figures.saved_bytes[KEEP].per_token == pytest.approx(held, rel=1e-3)
        again = figures.recompute_seconds["m"].per_token
        assert again == pytest.approx(1e-7 * (1 + len(kind)))
    assert made.first_seconds[Kind.FORWARD].per_token == pytest.approx(1e-7, rel=1e-3)
    assert made.last_seconds[Kind.FORWARD].per_token == pytest.approx(5e-7, rel=1e-3)
    assert made.last_bytes.per_token == pytest.approx(8, rel=1e-3)


def test_a_profile_is_measured_once_and_kept(groups, monkeypatch, tmp_path) -> None:
    """Rank 0 hears of it when it is measured, and not when it is read by the run that resumes."""
    made = measured(groups, ("local", "far"))
    monkeypatch.setattr(measure, "calibrate", lambda *args: made)
    monkeypatch.setattr(profile_file, "provenance_of", lambda args: made.provenance)
    monkeypatch.setattr(shape_module, "model_shape", lambda args: None)
    heard: list[Profile] = []
    for load in (None, str(tmp_path)):
        args = SimpleNamespace(
            save=str(tmp_path), load=load, seq_length=8, transformer_impl="local",
            gradient_accumulation_fusion=False, pipeline_model_parallel_size=1, epp_layouts=None,
            epp_cost_model=None,
        )  # fmt: skip
        config = SimpleNamespace(epp_cost_model=None, epp_record=None, epp_levers="default")
        assert profile_file.obtain(args, config, [], groups, None, heard.append) == made
        assert heard == [made]


def test_what_a_gpus_host_takes_is_measured_by_small_chunks_and_kept() -> None:
    """The least of six, apart from what the device takes; a CPU is its own host."""

    class Issued(MadeUpLayers):
        device, seconds = torch.device("cuda"), iter((5.0, 3.0, 4.0, 6.0, 9.0, 7.0))

        def now(self) -> float:
            raise AssertionError("the device is not asked for what its host takes")

        def timed_by(self, clock):
            assert isinstance(clock, IssueClock)
            return self

        def layers(self, shape: Shape, letters: str, weigh: bool = False, split: bool = False):
            second = next(self.seconds)
            return Measurement(second, 10 * second)

    small = Shape(64)
    found = measure._host_seconds(Issued(("far",)), small)
    assert found == [(3.0, 30.0)]
    every = [Readings(host=found), Readings(host=[(5.0, 40.0)]), Readings()]
    expected = {Kind.FORWARD: 4.0, Kind.BACKWARD: 35.0, Kind.INPUT: 28.0, Kind.WEIGHT: 15.75}
    assert fitted_host_seconds(every) == pytest.approx(expected)
    assert measure._host_seconds(MadeUpLayers(("far",)), small) == []
    assert fitted_host_seconds([Readings()]) == {}


class OnGpu(MadeUpLayers):
    """Whose backward takes twice as long for the pairs of ``twice``, and whose host 3 and 4 ms."""

    device, issued, twice = torch.device("cuda"), False, DIAGONALS[0]

    def now(self) -> float:
        return 0.0

    def timed_by(self, clock) -> "OnGpu":
        other = self.of_layer(self.at)
        other.issued = True
        return other

    def most_context(self, fraction: float) -> int:
        return 65536

    def layers(self, shape: Shape, letters: str, weigh: bool = False, split: bool = False):
        made = super().layers(shape, letters, weigh, split)
        if self.issued:
            return replace(made, forward_seconds=3e-3, backward_seconds=4e-3)
        _, pair, *_ = RULES[self.word[self.at]]
        twice = self.pace * 2 * pair * self.twice.of(shape.spans)
        return replace(made, backward_seconds=made.backward_seconds + twice)


@pytest.mark.parametrize("twice", DIAGONALS, ids=str)
def test_on_a_gpu_pairs_inside_a_slice_are_told_from_those_with_its_context(
    groups, monkeypatch, twice
) -> None:
    """With one mask for all calls, and with another for those without context. And the host's time
    from the device's."""
    monkeypatch.setattr(OnGpu, "twice", twice)
    profile = measured(groups, ("far",) * 2, OnGpu)
    token, pair, chunk, *_ = RULES["far"]
    for spans in (
        (Span(0, 0, 30000),), (Span(0, 40000, 48000),), (Span(0, 0, 900),) * 9,
        (Span(0, 8000, 16000),),
    ):  # fmt: skip
        tokens = sum(span.tokens for span in spans)
        forward = token * tokens + pair * sum(span.pairs for span in spans) + chunk
        diagonal = twice.of(spans)
        backward = 2 * forward + 2 * pair * diagonal
        assert profile.op_seconds(Kind.FORWARD, spans) == pytest.approx(forward, rel=1e-3)
        assert profile.op_seconds(Kind.BACKWARD, spans) == pytest.approx(backward, rel=1e-3)
        cost = Cost(StageLayout(profile, (2,)), (1e12,))
        chunks = [Chunk(tuple(replace(span, document=at) for at, span in enumerate(spans)))]
        if spans[0].start:
            chunks.insert(0, Chunk((Span(0, 0, spans[0].start),)))
        load = cost.loads(chunks, [span.stop for span in spans])
        taken = float(cost.seconds.of(Kind.BACKWARD, load)[0, -1])
        ends = 1e-6 * tokens
        assert taken == pytest.approx(2 * backward + ends, rel=1e-3)
    assert profile.host_seconds[Kind.FORWARD] == 3e-3
    assert profile.host_seconds[Kind.BACKWARD] == 4e-3
    for column in DIAGONALS:
        seconds = profile.column_seconds[column]
        assert seconds[Kind.INPUT] == seconds[Kind.BACKWARD] and seconds[Kind.WEIGHT] == 0
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(("lead", "spins"), [(3e-3, 5e-3), (20e-3, 0.0)])
def test_a_device_works_before_what_is_timed(lead: float, spins: float, monkeypatch) -> None:
    """And spins only for as long as its host needs a longer head start than the work gives."""
    happened: list[str] = []
    clock = [0.0]

    class Events:
        def start(self) -> None:
            happened.append("begin")

        def mark(self) -> str:
            return "end"

        def seconds(self, mark: str) -> float:
            return 1.5

    def now() -> float:
        clock[0] += lead if happened[-1:] == ["work"] else 0.0
        happened.append("wait")
        return clock[0]

    def sleep(cycles: int) -> None:
        happened.append("spin")
        assert cycles == pytest.approx(2e9 * spins, abs=1)

    monkeypatch.setattr(clocks.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(clocks.torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(clocks, "CudaClock", Events)
    timer = clocks.DeviceClock(now, lambda: happened.append("work"), 3)
    assert happened == ["work", "wait", "work", "wait"]  # the first for what happens only once
    for rested, times in ((True, 3), (False, 1)):
        happened.clear()
        assert timer.seconds(timer.start(rested)) == 1.5
        assert happened == ["wait", *["work"] * times, "spin", "begin", "wait"]


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b"])
def test_a_device_works_for_a_tenth_of_a_second_before_forwards(name: str, tp: int) -> None:
    """Of any share of a layer, at the rate of an H100; and the start is at most 6 s longer."""
    (layer,) = MODELS[name].shapes.values()
    shapes = measure.grid(layer, 8192, measure.GPU_FLOPS)
    large = Shape(max(shape.tokens for shape, _ in shapes) // 2)
    config = SimpleNamespace(tensor_model_parallel_size=tp, context_parallel_size=1)
    count = measure.busy_repeats(SimpleNamespace(config=config), layer, large)
    pairs = large.tokens * (large.tokens + 1) / 2
    forward = large.tokens * layer.flops_per_token + pairs * layer.flops_per_pair
    seconds = 3 * forward / tp / 5e14
    assert 0.1 <= count * seconds < 0.1 + seconds
    assert len(shapes) * measure.REPEATS * (count - 1) * seconds < 6


def test_slower_ranks_are_found_and_the_fastest_is_what_is_kept(groups, monkeypatch) -> None:
    """Rank 1 has no layer that rank 2 has; both have one of rank 0's. Ranks that a busy host makes
    10% slower are alike."""
    word = ("local", "far", "far")
    alike = measured(groups, word)
    of_ranks = {"local": (1.0, 1.5), "far": (1.0, None, 3.0)}

    def gathered(every: list, mine: Readings, group: object) -> None:
        factors = of_ranks[kinds.pop(0)]
        ranks = [(rank, factor) for rank, factor in enumerate(factors) if factor is not None]
        every[:] = [replace(mine.of_fastest(1 / factor), rank=rank) for rank, factor in ranks]

    monkeypatch.setattr(measure.dist, "all_gather_object", gathered)
    kinds = ["local", "far"]
    made = measured(groups, word)
    assert made.rank_slowness == (1.0, 1.5, 3.0)
    said = "pipeline ranks take 1.00, 1.50, 3.00 times as long as the fastest"
    assert said in made.provenance.source
    assert Profile.from_json(made.to_json()) == made
    for kind, figures in made.kinds.items():
        for op in (Kind.FORWARD, Kind.BACKWARD):
            found, known = figures.layer_seconds[op], alike.kinds[kind].layer_seconds[op]
            assert found.per_token == pytest.approx(known.per_token, rel=1e-6)
            assert found.per_pair == pytest.approx(known.per_pair, rel=1e-6)
    of_ranks = {"local": (1.0, 1.1), "far": (1.05, None, 0.95)}
    kinds = ["local", "far"]
    assert measured(groups, word).rank_slowness == ()

    def of_three_replicas(every: list, mine: Readings, group: object) -> None:
        every[:] = [replace(mine.of_fastest(1 / (1 + r)), replica=r) for r in (0, 0, 1)]

    monkeypatch.setattr(measure.dist, "all_gather_object", of_three_replicas)
    assert measured(groups, word).rank_slowness == ()  # a replica is not a rank of a pipeline


class Busy(MadeUpLayers):
    """Of which a B that runs something again was no slower than one that does not, and no pair was
    seen to take any time."""

    def layers(self, shape: Shape, letters: str, weigh: bool = False, split: bool = False):
        token, _, chunk, _, held = RULES[self.word[self.at]]
        seconds = token * shape.tokens + chunk
        return Measurement(
            seconds, 2 * seconds - 1e-5 * (letters != KEEP), round(held * shape.tokens)
        )


def test_nothing_runs_again_for_nothing(groups) -> None:
    """What a busy host hid is what the flops make of it, at the layer's own speed."""
    word = ("local", "far")
    shapes = {
        "local": LayerShape(experts=8, active_experts=2, expert_hidden=64, window=100),
        "far": LayerShape(kv_rank=16, query_rank=24, rotary_size=4, value_size=16),
    }
    model = Model("m", 2, 64, 128, 4, 2, 16, 1000, kinds=shapes, pattern="local far")
    made = calibrate([Busy(word)], groups, model, 65536, ORIGIN, False, [word])
    known = analytic_profile(model, device("cpu"))
    for kind, own, nothing in (("local", "e", "u"), ("far", "u", "e")):
        figures, told = made.kinds[kind], known.kinds[kind]
        forward = figures.layer_seconds[Kind.FORWARD]
        assert figures.recompute_seconds[nothing] == Seconds()
        assert figures.recompute_seconds[FULL] == forward
        assert figures.recompute_seconds["c"].per_pair > 0
        mine, theirs = figures.recompute_seconds[own], told.recompute_seconds[own]
        pairs = Shape(2048).pairs_within(figures.window)
        slower = forward(2048, pairs) / told.layer_seconds[Kind.FORWARD](2048, pairs)
        assert mine.per_token > 0
        assert mine.per_token == pytest.approx(theirs.per_token * slower)


class SpreadOrLocal(MadeUpLayers):
    """Over two context-parallel ranks; rows that are spread take EXCHANGE longer each, and twice
    that in backward."""

    EXCHANGE = 5e-7
    row_shard = RowShard(parts=2)
    config = SimpleNamespace(**{**vars(MadeUpLayers.config), "context_parallel_size": 2})

    def layers(self, shape: Shape, letters: str, weigh: bool = False, split: bool = False):
        made = super().layers(shape, letters, weigh, split)
        longer = 0.0 if shape.local else self.EXCHANGE * shape.tokens
        return dataclasses.replace(
            made,
            forward_seconds=made.forward_seconds + longer,
            backward_seconds=made.backward_seconds + 2 * longer,
        )


def test_what_rows_take_to_be_exchanged_is_found(groups) -> None:
    word = ("local", "far", "local")
    made = measured(groups, word, SpreadOrLocal)
    assert made.cp == 2
    exchange = SpreadOrLocal.EXCHANGE
    for figures in made.kinds.values():
        assert figures.exchange_seconds[Kind.FORWARD] == pytest.approx(exchange)
        assert figures.exchange_seconds[Kind.BACKWARD] == pytest.approx(2 * exchange)
        assert figures.exchange_seconds[Kind.INPUT] == pytest.approx(2 * exchange)
    alone = measured(groups, word)
    assert alone.exchange_seconds == {}


def test_blocks_of_the_end_are_of_all_context_ranks(groups, monkeypatch) -> None:
    """A rank's end takes 256 of its rows at a time; tokens are of the chunk."""
    monkeypatch.setattr(MadeUpLayers, "head_tokens", 256)
    assert measured(groups, ("local",)).last_workspace_tokens == 256
    both = SimpleNamespace(**{**vars(MadeUpLayers.config), "context_parallel_size": 2})
    monkeypatch.setattr(MadeUpLayers, "config", both)
    share = SimpleNamespace(parts=2, padded=lambda tokens: tokens)
    monkeypatch.setattr(MadeUpLayers, "row_shard", share, raising=False)
    assert measured(groups, ("local",)).last_workspace_tokens == 512


class SplitLayers(MadeUpLayers):
    """Layers whose I and W take 10% more than B; ``heads`` counts the LM head's split backwards.

    A ``far`` layer's linears defer nothing."""

    heads = 0

    def layers(self, shape: Shape, letters: str, weigh: bool = False, split: bool = False):
        made = super().layers(shape, letters, weigh)
        if not split or self.word[self.at] == "far":
            return made
        weight = 0.4 * made.backward_seconds
        inner = 1.1 * made.backward_seconds - weight
        return replace(made, backward_seconds=inner, weight_seconds=weight,
                       weight_input_bytes=300 * shape.tokens)  # fmt: skip

    def ends(self, shape: Shape, weigh: bool = False, split: bool = False) -> Measurement:
        SplitLayers.heads += split
        return super().ends(shape, weigh)


def test_every_kind_is_timed_whole_and_split_and_the_head_once(groups, monkeypatch) -> None:
    monkeypatch.setattr(SplitLayers, "heads", 0)
    heads = []
    for word in (("local",), ("local", "far", "local")):
        made = measured(groups, word, SplitLayers, split=True)
        heads.append(SplitLayers.heads)
    assert heads[1] == 2 * heads[0] > 0
    local, far = made.kinds["local"], made.kinds["far"]
    whole, inner, weight = (
        local.layer_seconds[kind](10_000, 0) for kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
    )
    assert inner + weight == pytest.approx(1.1 * whole, rel=0.02)
    assert local.weight_input_bytes.per_token == 300
    assert far.layer_seconds[Kind.INPUT] == far.layer_seconds[Kind.BACKWARD]
    assert far.layer_seconds[Kind.WEIGHT] == Seconds()
