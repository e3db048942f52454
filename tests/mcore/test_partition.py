"""--epp-partition auto: trains as even layers do, is kept, and is taken from the checkpoint."""

import json
from pathlib import Path

import pytest

from megatron_epp.mcore.partition import KEPT, KEPT_VOCABULARY
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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("partition") / "corpus", LENGTHS)


def test_losses_are_those_of_even_layers_and_a_resumed_run_keeps_them(
    corpus: Path, tmp_path: Path
) -> None:
    """All from one checkpoint of even layers: random weights are drawn stage by stage. The run of
    even layers chooses where its output layer lies."""
    begin, kept = tmp_path / "begin", tmp_path / "kept"
    made = train(flags(corpus, **BIG, train_iters=1, save=begin, save_interval=1))
    assert made.status == 0, made.output
    start = {**BIG, "load": begin, "finetune": True, "train_iters": 2}
    spread = tmp_path / "spread"
    even = train(flags(corpus, **start, save=spread, save_interval=2, epp_vocab_parallel="auto"))
    chosen = {"save": kept, "save_interval": 2, "epp_partition": "auto"}
    auto = train(flags(corpus, **start, **chosen))
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
    again = train(flags(corpus, **{**BIG, **chosen, **longer}))
    assert again.status == 0, again.output
    said = f"layers {layers[0]} {layers[1]} of the stages, the checkpoint's, as it resumes"
    assert said in again.output and len(again.losses) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"decoder-first-pipeline-num-layers": 4},
            "--decoder-first-pipeline-num-layers says where layers lie, and --epp-partition auto",
        ),
        ({"epp-partition": "even"}, "invalid choice: 'even'"),
    ],
)
def test_what_contradicts_it_is_refused(corpus: Path, changes: dict, said: str) -> None:
    refused = train(flags(corpus, **{**BIG, "epp-partition": "auto", **changes}))
    assert refused.status == 1 and set(refused.statuses) == {2}
    assert said in refused.output
