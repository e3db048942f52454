"""Layers and the place of the output layer by time: chosen, trained with, kept, and taken from the
checkpoint."""

import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import device
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.cost import Cost
from megatron_epp.mcore.choose import choices as job_choices
from megatron_epp.mcore.choose.choices import choose_stages
from megatron_epp.mcore.choose.kept import BLEND_KEY, CHOICES_FILE, kept_placement, kept_vocabulary
from megatron_epp.mcore.flags.config import PLACING_FLAGS
from megatron_epp.mcore.hybrid.pattern import with_boundaries
from megatron_epp.mcore.kinds.registry import require_pattern
from megatron_epp.mcore.placing.placeholder import placeholder
from megatron_epp.mcore.placing.requested import PLACE, STAGE_LAYERS
from megatron_epp.planner.choose.choice import RunChoice, Way
from tests.mcore.resumes import STOCK, STOCK_ON_DOCUMENTS, require_same_numbers
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


@pytest.mark.everything
def test_where_the_output_layer_lies_is_chosen_by_time_and_kept(
    corpus: Path, tmp_path: Path
) -> None:
    """By a cost model with a CPU's figures of BIG, by another name: on a CPU it is never spread."""
    shape = Model("big", 6, 32, 128, 4, 2, 8, 16384, gated=True)
    made, costs = profile(shape, device("cpu"), logits_held=False), tmp_path / "costs.json"
    other = replace(made.provenance, device="a device of a test")
    replace(made, provenance=other).save(str(costs))
    save = {"save": tmp_path / "saved", "save_interval": 1, "train_iters": 1}
    run = trained(flags(corpus, **BIG, **save, epp_cost_model=costs))
    assert re.search(
        r"--epp-vocab-parallel auto: on; compared with one stage a rank, layers 3 3: "
        r"vocabulary parallelism takes \S+% less time.* by "
        rf"{costs} \(simulated\)",
        run.output,
    )
    assert json.loads((tmp_path / "saved" / CHOICES_FILE).read_text()) == {
        "epp_vocab_parallel": "on",
        BLEND_KEY: "tokens",
        PLACE: [0, 1],
        STAGE_LAYERS: [3, 3],
    }


# Seven layers, so no two stages have equally many; MLPs take nearly all of the time.
PATTERN = "*----**"
HYBRID = {
    **STILL,
    "ffn-hidden-size": 2048,
    "global-batch-size": 12,
    "seq-length": 64,
    "max-position-embeddings": 64,
}


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
    require_same_numbers(auto, given, 2)
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
        (
            '{"epp_stage_layers": [2, 3], "epp_place": [0, 2]}',
            "layers [2, 3] on ranks [0, 2]; delete the file, and say with --epp-placement 'place "
            "... layers ...' what the checkpoint was made with",
        ),
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
