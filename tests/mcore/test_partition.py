"""Layers by time: they train as even layers do, are kept, and are taken from the checkpoint; so is
what --epp-vocab-parallel auto has chosen."""

import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import device
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.cost import Cost
from megatron_epp.ir.random_plan import arbitrary_plan
from megatron_epp.mcore.certify.model_flags import parsed
from megatron_epp.mcore.choose import choices as job_choices
from megatron_epp.mcore.choose.choices import choose_stages
from megatron_epp.mcore.choose.kept import (
    BLEND_KEY,
    CHOICES_FILE,
    kept_placement,
    kept_vocabulary,
)
from megatron_epp.mcore.flags.config import PLACING_FLAGS
from megatron_epp.mcore.hybrid.pattern import with_boundaries
from megatron_epp.mcore.kinds.registry import require_pattern
from megatron_epp.mcore.placing.placeholder import placeholder
from megatron_epp.mcore.placing.requested import PLACE, STAGE_LAYERS
from megatron_epp.planner.choose.choice import RunChoice, Way
from tests.mcore.resumes import STOCK_ON_DOCUMENTS
from tests.mcore.runs import flags, trained, write_corpus

LENGTHS = [100, 90, 40, 30, 20, 16, 12, 8, 8, 8, 8, 8] * 8
# A large vocabulary: its output layer takes layers from the last stage.
BIG = {
    "make-vocab-size-divisible-by": 16384,
    "num-layers": 6,
    "epp": True,
    "epp-memory-budget-gib": 1,
    "global-batch-size": 24,
}


PRETRAIN_HYBRID = ("-m", "megatron_epp.pretrain_hybrid")
STILL = {"lr": 0, "min-lr": 0}  # nothing is learnt
BY_TIME = {"epp_placement": "auto", "epp_planner": "infinipipe"}  # which has one stage a rank


def of_a_device(path: Path, slowness: tuple[float, ...] = ()) -> Path:
    """A cost model with a CPU's figures of BIG, by another name: on a CPU nothing is cut. With
    ``slowness`` of the ranks it keeps the CPU's."""
    shape = Model("big", 6, 32, 128, 4, 2, 8, 16384, gated=True)
    made = profile(shape, device("cpu"), logits_held=False)
    other = replace(made.provenance, device="a device of a test")
    made = replace(made, rank_slowness=slowness) if slowness else replace(made, provenance=other)
    made.save(str(path))
    return path


@pytest.mark.everything
def test_losses_are_those_of_even_layers_and_a_resumed_run_keeps_them(
    corpus: Path, tmp_path: Path
) -> None:
    """Random weights are drawn stage by stage, so the second run takes those that the first began
    with: it learnt nothing. The run of even layers chooses where its output layer lies."""
    spread, kept = tmp_path / "spread", tmp_path / "kept"
    start = {**BIG, "train_iters": 2, "save_interval": 2}
    costs = of_a_device(tmp_path / "costs.json")
    even = trained(flags(corpus, **start, **STILL, save=spread, epp_cost_model=costs))
    chosen = {"save": kept, **BY_TIME}
    # Rank 0 is taken for slower, so that the heavy end on rank 1 keeps more of the layers.
    slower = of_a_device(tmp_path / "slower.json", (4.0, 1.0))
    how = {"epp_cost_model": slower, "load": spread, "finetune": True}
    auto = trained(flags(corpus, **start, **STILL, **chosen, **how))
    assert re.search(
        r"--epp-vocab-parallel auto: on; compared with one stage a rank, layers 3 3: "
        r"vocabulary parallelism takes \S+% less time.* by "
        rf"{costs} \(simulated\)",
        even.output,
    )
    assert json.loads((spread / CHOICES_FILE).read_text()) == {
        "epp_vocab_parallel": "on",
        BLEND_KEY: "tokens",
        PLACE: [0, 1],
        STAGE_LAYERS: [3, 3],
    }
    choices = json.loads((kept / CHOICES_FILE).read_text())
    layers = choices[STAGE_LAYERS]
    others = {"epp_vocab_parallel": "off", BLEND_KEY: "tokens"}
    assert choices == {**others, PLACE: [0, 1], STAGE_LAYERS: layers}
    on_a_cpu = "--epp-vocab-parallel auto: off; on a CPU it took 1.16 of the time (measured)"
    assert on_a_cpu in auto.output
    assert sum(layers) == 6 and 1 <= layers[0] < layers[1]
    assert f"auto: stages on ranks 0 1, layers {layers[0]} {layers[1]} of the stages" in auto.output
    assert len(auto.losses) == len(even.losses) == 2
    assert auto.losses == pytest.approx(even.losses, rel=1e-5)  # float32, printed with seven digits
    assert auto.grad_norms == pytest.approx(even.grad_norms, rel=1e-3)
    # Resumed without a word of lengths: what the checkpoint has.
    longer = {"load": kept, "train_iters": 3, "override-opt-param-scheduler": True}
    again = trained(flags(corpus, **{**start, **STILL, **chosen, **longer}))
    said = f"layers {layers[0]} {layers[1]} of the stages; the checkpoint's, as it resumes"
    assert said in again.output and len(again.losses) == 1
    assert "--epp-vocab-parallel auto: off; the checkpoint's, as it resumes" in again.output


# Seven layers, so no two stages have equally many; MLPs take nearly all of the time.
PATTERN = "*----**"
HYBRID = {
    **STILL,
    "ffn-hidden-size": 2048,
    "global-batch-size": 12,
    "seq-length": 64,
    "max-position-embeddings": 64,
}
STOCK = {"micro-batch-size": 1, "calculate-per-token-loss": True, "dataloader-type": "single"}


@pytest.mark.everything
def test_borders_of_a_hybrid_models_stages_are_found_and_kept(tmp_path: Path) -> None:
    """Megatron's own schedule begins, on stages that its user has named; the run that goes on with
    its weights chooses stages, and has the output layer over them; Megatron's own ends."""
    corpus = write_corpus(tmp_path / "equal", [65] * 24)
    begin, kept = tmp_path / "begin", tmp_path / "kept"
    start = {**HYBRID, "train-iters": 2, "save-interval": 2}
    named = {"hybrid-layer-pattern": "*----*|*", "save": begin}
    given = trained(flags(corpus, **{**start, **STOCK, **named}), program=STOCK_ON_DOCUMENTS)
    chosen = {**BY_TIME, "epp-vocab-parallel": "on", "save": kept}
    ours = {"hybrid-layer-pattern": PATTERN, "epp": True, "epp-memory-budget-gib": 1, **chosen}
    weights = {"load": begin, "finetune": True}
    auto = trained(flags(corpus, **{**start, **ours, **weights}), program=PRETRAIN_HYBRID)
    first, second = json.loads((kept / CHOICES_FILE).read_text())[STAGE_LAYERS]
    pattern = f"{PATTERN[:first]}|{PATTERN[first:]}"
    assert first + second == 7 and first < second  # even ones would be 4 and 3
    of_stages = f"stages on ranks 0 1, layers {first} {second} of the stages, {pattern}; "
    assert f"--epp-placement auto: {of_stages}" in auto.output
    assert len(auto.losses) == len(given.losses) == 2
    assert auto.losses == pytest.approx(given.losses, rel=2e-6)
    assert auto.grad_norms == pytest.approx(given.grad_norms, abs=2e-3)
    last = {"hybrid-layer-pattern": pattern, "load": kept, "train-iters": 3}
    again = {**last, **STOCK, "override-opt-param-scheduler": True}
    back = trained(flags(corpus, **{**HYBRID, **again}), program=STOCK_ON_DOCUMENTS)
    assert "iteration        3/" in back.output
    # Resumed with ours, it is not chosen again.
    resumes = {"load": str(kept), "finetune": False, "num_layers": 7, "epp_plan": None}
    args = wanted(hybrid_layer_pattern=PATTERN, epp=True, **resumes)
    (said,) = choose_stages(args)
    assert args.hybrid_layer_pattern == pattern
    assert said.endswith(f"{pattern}; the checkpoint's, as it resumes (kept next to it)")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "off; what it saves is not known: no --data-path, so no lengths are known"),
        (
            {"mock_data": True},
            "off; what it saves is not known: lengths are read from the files of --data-path",
        ),
        ({"pre_wrap": print}, "off; a script changes the model before it is wrapped, as adap"),
        ({"items": print}, "off; no lengths are known of documents from Python"),
        ({"padded_vocab_size": 129}, "off; 129 words, padded, do not divide over 2 stages times"),
        ({"use_mup": True}, "off; it does not run scaled logits (--use-mup)"),
        ({"save": "x", "ckpt_format": "zarr"}, "off; --ckpt-format zarr knows no parts of it"),
        ({"num_experts": 4, "expert_model_parallel_size": 2}, "off; experts are sharded over re"),
        ({"epp_placement": "even", "pipeline_model_parallel_layout": "Et|tL"}, "off; --pipel"),
        ({"mtp_detach_heads": True}, "off; --epp does not run MTP losses without gradients"),
        ({"epp_plan": "cut.plan"}, "on; as the plans of --epp-plan have it"),
        ({"epp_plan": "whole.plan"}, "off; as the plans of --epp-plan have it"),
        ({"load": "on"}, "on; the checkpoint's, as it resumes"),
        ({"load": "off"}, "off; the checkpoint's, as it resumes"),
        ({"load": "untold"}, "off; the checkpoint's, as it resumes"),  # Megatron's own, perhaps
        ({"load": "on", "finetune": True}, "off; what it saves is not known: no --data-path"),
    ],
)
def test_what_auto_cannot_have_is_off_with_one_line(
    changes: dict, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, cut in (("cut.plan", True), ("whole.plan", False)):
        plan = arbitrary_plan([30, 5], (1, 1), Random(0), vocabulary_parallel=cut)
        Path(name).write_text(str(plan))
    for name in ("on", "off", "untold"):
        Path(name).mkdir()
        Path(name, "latest_checkpointed_iteration.txt").write_text("3")
        if name != "untold":
            Path(name, CHOICES_FILE).write_text(json.dumps({"epp_vocab_parallel": name}))
    # As if on a device: on a CPU nothing is read.
    monkeypatch.setattr("megatron_epp.planner.choose.choice.is_of_cpu", lambda profile: False)
    words = "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    words += "--max-position-embeddings 64"
    args = parsed(words.split(), 2)
    filled = {"epp_vocab_parallel": "auto", "padded_vocab_size": 128, "data_parallel_size": 1}
    filled |= {"calculate_per_token_loss": True, "dataloader_type": "external"}
    filled |= {"attention_dropout": 0.0, "ffn_hidden_size": 128, "kv_channels": 8}
    filled |= {"num_query_groups": 4, "expert_tensor_parallel_size": 1}
    vars(args).update(filled | {"epp_cost_model": "analytic", **changes})
    parts = SimpleNamespace(pre_wrap=changes.get("pre_wrap"), items=changes.get("items"))
    line, *_ = choose_stages(args, parts)
    assert line.startswith(f"--epp-vocab-parallel auto: {said}") and "\n" not in line
    assert args.epp_vocab_parallel == said.split(";")[0]


@pytest.mark.parametrize("settled", ["on", "off"])
def test_layers_are_chosen_for_the_vocabulary_that_is_settled(
    settled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a checkpoint or --epp-plan has it, while the layers are open."""
    cost = named_cost("llama3-8b", "h100-80g", pp=2, tp=8)
    tried = []

    def run_choice(cost: Cost, *_: object, vocabularies: list[bool], **__: object) -> RunChoice:
        tried.extend(vocabularies)
        way = Way("even", cost.layout.layers, vocabularies[0])
        return RunChoice(cost.with_vocabulary(vocabularies[0]), way, {way: 1.0})

    monkeypatch.setattr("megatron_epp.planner.choose.choice.run_choice", run_choice)
    monkeypatch.setattr(job_choices, "cost_and_options", lambda args, layers: (cost, None))
    monkeypatch.setattr(job_choices, "first_batches", lambda args: [[4096] * 8])
    monkeypatch.setattr(job_choices, "_settled_vocabulary", lambda *_: (settled, "settled"))
    monkeypatch.setattr(job_choices, "resumes", lambda args: False)
    args = wanted(epp=True, epp_vocab_parallel="auto", num_layers=32, epp_plan=None)
    vars(args).update(epp_cost_model="analytic", save=None, load=None)
    job_choices.choose_stages(args)
    assert tried == [settled == "on"] and args.epp_vocab_parallel == settled


def test_without_epp_or_stages_there_is_nothing_to_choose() -> None:
    for changes in ({"epp": False}, {"epp": True, "pipeline_model_parallel_size": 1}):
        args = wanted(epp_vocab_parallel="auto", **changes)
        assert choose_stages(args) == [] and args.epp_vocab_parallel == "off"


def test_a_document_longer_than_a_replicas_part_is_said_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost = named_cost("llama3-8b", "h100-80g", pp=2, cp=2, dp=4)
    batches = [[4096] * 8, [262_144, *[2048] * 63]]
    monkeypatch.setattr(job_choices, "cost_and_options", lambda args, layers: (cost, None))
    monkeypatch.setattr(job_choices, "first_batches", lambda args: batches)
    for other in ("choose_blend", "choose_row_multiple"):
        monkeypatch.setattr(job_choices, other, lambda *args: None)
    monkeypatch.setattr(job_choices, "choose_stages", lambda *args: [])
    monkeypatch.setattr(job_choices, "placement_of", lambda args: SimpleNamespace(layers=(16, 16)))

    def lines(replicas: int) -> list[str]:
        args = wanted(epp=True, num_layers=32, data_parallel_size=replicas)
        return job_choices.choose(args)

    assert lines(1) == []
    (line,) = lines(4)
    assert line.startswith("a document of 262144 tokens takes ")
    assert "--context-parallel-size 8, with 1 replicas" in line or "with 2 replicas" in line
    batches.pop()
    assert lines(4) == []


def wanted(**changes: object) -> Namespace:
    given = {
        "epp_placement": "auto",
        "epp_vocab_parallel": "off",
        "epp_planner": "epp",
        "epp_levers": "default",
        "pipeline_model_parallel_size": 2,
        "num_layers": 6,
        "hybrid_layer_pattern": None,
        "mtp_num_layers": None,
        **PLACING_FLAGS,
    }
    return Namespace(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 1}, "size 2: more stages than the 1 layers; expected at most one stage"),
        ({"hybrid_layer_pattern": "*", "num_layers": 6}, "more stages than the 1 layers"),
    ],
)
def test_what_contradicts_it_is_refused(changes: dict, said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        placeholder(wanted(**changes))
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_until_it_is_chosen_stages_are_even() -> None:
    """A pattern without | passes Megatron's own checks, and ours, whatever its length."""
    assert placeholder(wanted()) == {"pipeline_model_parallel_layout": "Et*3|t*3L"}
    further = {"pipeline_model_parallel_layout": "Et*3|t*3mmL"}
    assert placeholder(wanted(mtp_num_layers=2)) == further
    assert placeholder(wanted(pipeline_model_parallel_size=1)) == {}
    assert placeholder(wanted(epp_placement="even")) == {}
    assert placeholder(wanted(num_layers=None)) == {}  # the checkpoint's (--use-checkpoint-args)
    hybrid = wanted(hybrid_layer_pattern="*-*-*", num_layers=None, num_experts=None)
    assert placeholder(hybrid) == {}
    require_pattern(hybrid)
    assert with_boundaries("*-|*-*/*", (1, 4)) == "*|-*-*/*"


PLACED = {PLACE: [1, 0, 0, 1], STAGE_LAYERS: [1, 2, 2, 1]}


@pytest.mark.parametrize(
    ("choices", "vocabulary", "place", "layers"),
    [
        ({}, False, None, None),
        ({"epp_vocab_parallel": "on", **PLACED}, True, (1, 0, 0, 1), (1, 2, 2, 1)),
        # Of a version that kept none of the layers that its flags say.
        ({"epp_vocab_parallel": "off"}, False, None, None),
    ],
)
def test_a_file_of_choices_is_read(
    choices: dict, vocabulary: bool, place: tuple | None, layers: tuple | None, tmp_path: Path
) -> None:
    if choices:
        (tmp_path / CHOICES_FILE).write_text(json.dumps(choices) + "\n")
    args = wanted(load=str(tmp_path))
    assert kept_vocabulary(args) == vocabulary
    kept = kept_placement(args)
    assert (kept and kept.place, kept and kept.layers) == (place, layers)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[2,", "no choices ("),
        ('{"epp_stage_layers": [2, 0]}', "no partition (expected layers by stage)"),
        ('{"epp_stage_layers": [2, 3], "epp_place": [0, 2]}', "layers [2, 3] on ranks [0, 2]; del"),
        ('{"epp_vocab_parallel": "perhaps"}', 'expected "on" or "off"; delete the'),
        ('{"epp_vocab_parallel": true}', 'expected "on" or "off"; delete the file'),
        ('"on"', "no choices (expected an object); delete the file"),
        ("{" * 10**5, "no choices ("),
        ('{"epp_stage_layers": [6], "epp_place": [0, 1]}', "layers [6] on ranks [0, 1]"),
        (
            '{"epp_stage_layers": 6}',
            "no partition (expected layers by stage); delete the file, and",
        ),
        ('{"epp_stage_layers": [3, 3], "epp_place": "01"}', "no partition (expected"),
    ],
)
def test_a_damaged_file_of_choices_is_refused_in_one_line(
    text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / CHOICES_FILE).write_text(text)
    args = wanted(load=str(tmp_path))
    with pytest.raises(ValueError) as refusal:
        kept_vocabulary(args)
        kept_placement(args)
    assert str(refusal.value).startswith(f"{tmp_path / CHOICES_FILE}: ")
    assert said in str(refusal.value) and "\n" not in str(refusal.value)
