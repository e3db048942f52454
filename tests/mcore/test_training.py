"""``--epp`` inside Megatron's trainer: resuming, checkpoints both ways, Megatron's own numbers."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_epp.ir import Step
from tests.mcore.runs import PROGRAM, Run, flags, train, write_corpus

LENGTHS = [97, 3, 40, 260, 9, 12, 65, 30, 2, 128, 129, 21, 5, 77, 18, 150, 33, 8, 61, 11]
# Saved by parameter: the optimizer's default format holds padding, which is whatever memory held,
# and cannot be loaded with another number of stages.
OPTIMIZER = {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}
Flags = Mapping[str, object]
EMPTY: Flags = {}
STOCK_ON_DOCUMENTS = (str(Path(__file__).with_name("stock_on_documents.py")),)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", LENGTHS)


@pytest.fixture(scope="module")
def six(corpus, tmp_path_factory) -> tuple[Path, Run]:
    """Six iterations on two stages, saved after three and six."""
    folder = tmp_path_factory.mktemp("six")
    run = train(
        flags(
            corpus,
            train_iters=6,
            save=folder,
            save_interval=3,
            **OPTIMIZER,
            epp=True,
            epp_record=folder / "plans",
        ),
        afresh=True,  # torchrun's own, all the way
    )
    assert run.status == 0, run.output
    return folder, run


def after_three(six: Path, folder: Path) -> Path:
    """A checkpoint folder whose latest is the one of iteration 3."""
    shutil.copytree(six / "iter_0000003", folder / "iter_0000003")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def first_and_third(losses: list[float]) -> tuple[float, float]:
    """Of the three iterations after a start; for the second, Megatron's log shows the mean of the
    first two (training_log does not reset its sums after the first iteration of a run)."""
    first, _, third = losses
    return first, third


def tensors(folder: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """All tensors of a torch_dist checkpoint, by name."""
    dcp_to_torch_save(folder, scratch)
    found: dict[str, torch.Tensor] = {}

    def collect(value, name: str):
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                collect(inner, f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for key, inner in enumerate(value):
                collect(inner, f"{name}.{key}")

    collect(torch.load(scratch, weights_only=False), "")
    return found


def test_three_and_three_are_six_bit_for_bit(corpus, six, tmp_path):
    folder, straight = six
    start = after_three(folder, tmp_path)
    resumed = train(
        flags(
            corpus,
            train_iters=6,
            load=start,
            save=tmp_path / "resumed",
            save_interval=6,
            **OPTIMIZER,
            epp=True,
            epp_record=tmp_path / "plans",
        )
    )
    assert resumed.status == 0, resumed.output
    assert first_and_third(resumed.losses) == first_and_third(straight.losses[3:])
    for iteration in (4, 5, 6):
        name = f"iteration-{iteration:06d}.step"
        planned, again = ((f / "plans" / name).read_text() for f in (folder, tmp_path))
        assert planned == again
    mine = tensors(tmp_path / "resumed" / "iter_0000006", tmp_path / "a.pt")
    theirs = tensors(folder / "iter_0000006", tmp_path / "b.pt")
    assert mine.keys() == theirs.keys()
    assert sum("exp_avg" in name for name in mine) > 0
    # The run's own folders are in the saved flags as bytes, of another length: they are no state.
    names = [name for name in mine if mine[name].is_floating_point()]
    assert len(names) >= 15
    for name in names:
        assert torch.equal(mine[name], theirs[name]), name


@pytest.fixture(scope="module")
def six_spread(corpus, tmp_path_factory) -> tuple[Path, Run]:
    """Six iterations with the output layer over the two stages, saved after three and six."""
    folder = tmp_path_factory.mktemp("spread")
    run = train(
        flags(
            corpus,
            train_iters=6,
            save=folder,
            save_interval=3,
            **OPTIMIZER,
            epp=True,
            epp_vocab_parallel="on",
            epp_record=folder / "plans",
        )
    )
    assert run.status == 0, run.output
    return folder, run


def test_an_output_layer_over_the_stages_trains_alike(six, six_spread):
    """It begins with the same weights, and a checkpoint holds it as if it lay on one stage."""
    (folder, whole), (spread_folder, spread) = six, six_spread
    assert spread.losses == pytest.approx(whole.losses, rel=2e-6)
    assert spread.grad_norms == pytest.approx(whole.grad_norms, abs=2e-3)
    step = Step.parse((spread_folder / "plans" / "iteration-000004.step").read_text())
    assert all(plan.vocabulary_parallel for plan in step.plans)
    step = Step.parse((folder / "plans" / "iteration-000004.step").read_text())
    assert not any(plan.vocabulary_parallel for plan in step.plans)


def test_with_an_output_layer_over_the_stages_three_and_three_are_six(corpus, six_spread, tmp_path):
    """Bit for bit."""
    folder, straight = six_spread
    resumed = train(
        flags(
            corpus,
            train_iters=6,
            load=after_three(folder, tmp_path),
            save=tmp_path / "resumed",
            save_interval=6,
            **OPTIMIZER,
            epp=True,
            epp_vocab_parallel="on",
        )
    )
    assert resumed.status == 0, resumed.output
    assert first_and_third(resumed.losses) == first_and_third(straight.losses[3:])
    mine = tensors(tmp_path / "resumed" / "iter_0000006", tmp_path / "a.pt")
    theirs = tensors(folder / "iter_0000006", tmp_path / "b.pt")
    assert mine.keys() == theirs.keys()
    (layer,) = (name for name in mine if name.endswith("output_layer.weight") and "opt" not in name)
    assert mine[layer].shape == (128, 32)
    for name in (name for name in mine if mine[name].is_floating_point()):
        assert torch.equal(mine[name], theirs[name]), name


def test_tied_words_over_the_stages_step_alike_and_go_to_megatron_and_back(corpus, tmp_path):
    """The embedding's words and their copies, which a checkpoint does not tell apart."""
    tied = {"untie_embeddings_and_output_weights": None}
    common = {"train_iters": 6, **tied, **OPTIMIZER, "exit_interval": 3, "epp": True}
    whole = train(flags(corpus, **common))
    save = {"save": tmp_path / "ours", "save_interval": 3}
    spread = train(flags(corpus, epp_vocab_parallel="on", **common, **save))
    assert whole.status == spread.status == 0, whole.output + spread.output
    assert len(spread.losses) == 3
    assert spread.losses == pytest.approx(whole.losses, rel=2e-6)
    assert spread.grad_norms == pytest.approx(whole.grad_norms, abs=2e-3)
    found = tensors(tmp_path / "ours" / "iter_0000003", tmp_path / "a.pt")
    assert not any("output_layer" in name for name in found)
    to_megatron_and_back(
        corpus,
        tmp_path / "ours",
        # Other ranks, and padded to another number of words.
        stock={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1},
        ours={"epp_vocab_parallel": "on"},
        **tied,
    )


def test_another_number_of_stages_on_resume(corpus, six, tmp_path):
    folder, straight = six
    run = train(
        flags(
            corpus,
            train_iters=6,
            load=after_three(folder, tmp_path),
            pipeline_model_parallel_size=1,
            **OPTIMIZER,
            epp=True,
            epp_record=tmp_path / "plans",
        ),
        processes=1,
    )
    assert run.status == 0, run.output
    theirs = first_and_third(straight.losses[3:])
    assert first_and_third(run.losses) == pytest.approx(theirs, rel=2e-6)
    for iteration in (4, 5, 6):
        name = f"iteration-{iteration:06d}.step"
        before, now = (Step.parse((f / "plans" / name).read_text()) for f in (folder, tmp_path))
        assert before.lengths == now.lengths


def to_megatron_and_back(
    corpus: Path,
    folder: Path,
    stock: Flags = EMPTY,
    ours: Flags = EMPTY,
    program: tuple[str, ...] = PROGRAM,
    **model: object,
) -> None:
    """Megatron's own schedule trains iteration 4 from the checkpoint, and ours the one after, each
    with flags of its own."""
    common = {"train_iters": 6, **model, **OPTIMIZER}
    theirs = {
        "save": folder / "stock",
        "save_interval": 4,
        "micro_batch_size": 1,
        **common,
        **stock,
    }
    there = train(flags(corpus, exit_interval=4, load=folder, **theirs), program=program)
    assert there.status == 0, there.output
    assert len(there.losses) == 1 and "iteration        4/" in there.output
    how = {"exit_interval": 5, "load": folder / "stock", "epp": True}
    back = train(flags(corpus, **how, **{**common, **ours}), program=program)
    assert back.status == 0, back.output
    assert len(back.losses) == 1 and "iteration        5/" in back.output


def test_checkpoints_load_both_ways(corpus, six, tmp_path):
    folder, _ = six
    to_megatron_and_back(corpus, after_three(folder, tmp_path))


def test_equal_documents_give_megatrons_own_numbers(tmp_path):
    corpus = write_corpus(tmp_path / "equal", [65] * 24)
    common = {"seq_length": 64, "max_position_embeddings": 64, "train_iters": 4}
    elastic = train(flags(corpus, epp=True, **common))
    assert elastic.status == 0, elastic.output
    stock = train(
        flags(
            corpus,
            micro_batch_size=1,
            calculate_per_token_loss=True,
            dataloader_type="single",
            **common,
        ),
        program=STOCK_ON_DOCUMENTS,
    )
    assert stock.status == 0, stock.output
    assert len(stock.losses) == 4
    assert elastic.losses == pytest.approx(stock.losses, rel=2e-6)
    assert elastic.grad_norms == pytest.approx(stock.grad_norms, abs=2e-3)
