"""Training with weights held in fp8: losses are those of weights quantised in every iteration."""

from pathlib import Path

import pytest

from tests.mcore.runs import Run, flags, trained, write_corpus

pytestmark = pytest.mark.gpu

LENGTHS = [5, 80, 17, 120, 33, 2, 64, 9, 100, 41, 28, 77] * 2
ITERATIONS, SAVED = 3, 2
HELD = {"fp8_param_gather": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``run(**changes)``: a training run."""
    folder = tmp_path_factory.mktemp("held")
    corpus = write_corpus(folder / "corpus", LENGTHS)

    def run(**changes: object) -> Run:
        named = {
            "epp": True,
            "bf16": True,
            "pipeline_model_parallel_size": 1,
            "ffn_hidden_size": 64,
            "transformer_impl": "transformer_engine",
            "fp8_format": "e4m3",
            "fp8_recipe": "tensorwise",
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "train_iters": ITERATIONS,
            # A step that fp8 feels.
            "lr": "4e-2",
            "lr_decay_style": "constant",
            # Megatron's default keeps what the optimizer has of weights in fp8 apart from the rest.
            "dist_ckpt_optim_fully_reshardable": True,
        }
        made = trained(flags(corpus, **(named | changes)))
        return made

    return run


def saved(folder: Path) -> dict[str, object]:
    return {"save": folder, "save_interval": SAVED}


def resumed(folder: Path) -> dict[str, object]:
    return {"load": folder, "ckpt_step": SAVED}


def test_a_step_is_seen_and_checkpoints_go_both_ways(runs, tmp_path) -> None:
    """Over two replicas, each of which casts a part of the weights."""
    plain = runs(**saved(tmp_path / "plain"))
    held = runs(**HELD, **saved(tmp_path / "held"))
    assert len(set(plain.losses)) == ITERATIONS and held.losses == plain.losses
    assert "what is computed together shares a scale" in plain.output
    for folder, way in (("plain", HELD), ("held", {})):
        assert runs(**way, **resumed(tmp_path / folder)).losses == plain.losses[SAVED:], folder
