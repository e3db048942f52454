"""--epp-partition auto: trains as even layers do, is kept, and is taken from the checkpoint."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_epp.mcore.config import PLACING_FLAGS
from megatron_epp.mcore.model.hybrid.pattern import refuse_segments, with_borders
from megatron_epp.mcore.model.kinds.registry import require_pattern
from megatron_epp.mcore.partition import (
    KEPT,
    KEPT_VOCABULARY,
    choose_partition,
    placeholder,
)
from tests.mcore.resumes import STOCK_ON_DOCUMENTS
from tests.mcore.runs import flags, train, write_corpus

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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("partition") / "corpus", LENGTHS)


def test_losses_are_those_of_even_layers_and_a_resumed_run_keeps_them(
    corpus: Path, tmp_path: Path
) -> None:
    """Random weights are drawn stage by stage, so the second run takes those that the first began
    with: it learnt nothing. The run of even layers chooses where its output layer lies."""
    spread, kept = tmp_path / "spread", tmp_path / "kept"
    start = {**BIG, "train_iters": 2, "save_interval": 2}
    even = train(flags(corpus, **start, **STILL, save=spread, epp_vocab_parallel="auto"))
    chosen = {"save": kept, "epp_partition": "auto"}
    auto = train(flags(corpus, **start, **STILL, **chosen, load=spread, finetune=True))
    assert even.status == auto.status == 0, even.output + auto.output
    assert "--epp-vocab-parallel auto: on; " in even.output
    assert (spread / KEPT_VOCABULARY).read_text() == '"on"\n'
    layers = json.loads((kept / KEPT).read_text())
    assert sum(layers) == 6 and layers[0] > layers[1] >= 1
    assert f"--epp-partition auto: layers {layers[0]} {layers[1]} of the stages" in auto.output
    assert len(auto.losses) == len(even.losses) == 2
    assert auto.losses == pytest.approx(even.losses, rel=1e-5)  # float32, printed with seven digits
    assert auto.grad_norms == pytest.approx(even.grad_norms, rel=1e-3)
    # Resumed without a word of lengths: what the checkpoint has.
    longer = {"load": kept, "train_iters": 3, "override-opt-param-scheduler": True}
    again = train(flags(corpus, **{**start, **STILL, **chosen, **longer}))
    assert again.status == 0, again.output
    said = f"layers {layers[0]} {layers[1]} of the stages, the checkpoint's, as it resumes"
    assert said in again.output and len(again.losses) == 1


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


def test_borders_of_a_hybrid_models_stages_are_found_and_kept(tmp_path: Path) -> None:
    """Megatron's own schedule begins, on stages that its user has named; the run that goes on with
    its weights chooses stages, and has the output layer over them; Megatron's own ends."""
    corpus = write_corpus(tmp_path / "equal", [65] * 24)
    begin, kept = tmp_path / "begin", tmp_path / "kept"
    start = {**HYBRID, "train-iters": 2, "save-interval": 2}
    named = {"hybrid-layer-pattern": "*----*|*", "save": begin}
    given = train(flags(corpus, **{**start, **STOCK, **named}), program=STOCK_ON_DOCUMENTS)
    chosen = {"epp-partition": "auto", "epp-vocab-parallel": "on", "save": kept}
    ours = {"hybrid-layer-pattern": PATTERN, "epp": True, "epp-memory-budget-gib": 1, **chosen}
    weights = {"load": begin, "finetune": True}
    auto = train(flags(corpus, **{**start, **ours, **weights}), program=PRETRAIN_HYBRID)
    assert given.status == auto.status == 0, given.output + auto.output
    first, second = json.loads((kept / KEPT).read_text())
    pattern = f"{PATTERN[:first]}|{PATTERN[first:]}"
    assert first + second == 7 and first < second  # even ones would be 4 and 3
    assert (
        f"--epp-partition auto: layers {first} {second} of the stages, {pattern}, " in auto.output
    )
    assert len(auto.losses) == len(given.losses) == 2
    assert auto.losses == pytest.approx(given.losses, rel=2e-6)
    assert auto.grad_norms == pytest.approx(given.grad_norms, abs=2e-3)
    last = {"hybrid-layer-pattern": pattern, "load": kept, "train-iters": 3}
    again = {**last, **STOCK, "override-opt-param-scheduler": True}
    back = train(flags(corpus, **{**HYBRID, **again}), program=STOCK_ON_DOCUMENTS)
    assert back.status == 0 and "iteration        3/" in back.output, back.output
    # Resumed with ours, it is not chosen again.
    resumes = {"load": str(kept), "finetune": False, "num_layers": 7}
    args = wanted(hybrid_layer_pattern=PATTERN, epp=True, **resumes)
    said = choose_partition(args)
    assert args.hybrid_layer_pattern == pattern
    assert said.endswith(f"{pattern}, the checkpoint's, as it resumes (kept in {KEPT})")


def wanted(**changes: object) -> Namespace:
    given = {
        "epp_partition": "auto",
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
        (
            {"decoder_first_pipeline_num_layers": 4},
            "--decoder-first-pipeline-num-layers says where layers lie, and --epp-partition auto",
        ),
        (
            {"hybrid_layer_pattern": "*-|*", "num_layers": None},
            "--hybrid-layer-pattern *-|*: its | say where stages end, and --epp-partition auto "
            "chooses that: leave one of the two out",
        ),
        ({"num_layers": 1}, "size 2: more stages than the 1 layers; expected at most one stage"),
        ({"hybrid_layer_pattern": "*", "num_layers": 6}, "more stages than the 1 layers"),
        ({"num_layers": None}, "divides the layers of --num-layers or --hybrid-layer-pattern"),
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
    assert placeholder(wanted(epp_partition="flags")) == {}
    hybrid = wanted(hybrid_layer_pattern="*-*-*", num_layers=None, num_experts=None)
    assert placeholder(hybrid) == {}
    require_pattern(hybrid)
    refuse_segments(hybrid)
    assert with_borders("*-|*-*/*", (1, 4)) == "*|-*-*/*"


def test_a_refusal_ends_with_status_2(corpus: Path) -> None:
    wrong = {"epp-partition": "auto", "decoder-last-pipeline-num-layers": 4}
    refused = train(flags(corpus, **{**BIG, **wrong}))
    assert refused.status == 1 and set(refused.statuses) == {2}
    assert "--decoder-last-pipeline-num-layers says where layers lie" in refused.output
