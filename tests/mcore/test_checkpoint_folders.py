"""Folders that a killed job leaves: which checkpoint a start loads, what it says of others."""

import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_epp.mcore.choose.kept import resumable_line, resumes
from megatron_epp.mcore.job.checkpoint_folders import (
    TRACKER,
    leftover_lines,
    require_complete,
    require_local,
)
from megatron_epp.mcore.trainer.host_facts import facts_of
from tests.mcore.resumes import OPTIMIZER
from tests.mcore.runs import flags, trained
from tests.mcore.test_refusals import refused

ALONE = {"pipeline_model_parallel_size": 1, "global_batch_size": 4, "epp": True}


def given(load: Path, **changes: object) -> Namespace:
    known = {"ckpt_step": None, "pretrained_checkpoint": None, "finetune": False}
    known |= {"non_persistent_ckpt_type": None, "non_persistent_global_ckpt_dir": None}
    return Namespace(load=str(load), tokenizer_model=None, **known | changes)


def saved(folder: Path, *names: str, tracker: str | None = None) -> None:
    """Files of checkpoints in ``folder``, such as "40/metadata.json"."""
    for name in names:
        number, _, file = name.partition("/")
        path = folder / f"iter_{int(number):07d}" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    if tracker is not None:
        (folder / TRACKER).write_text(tracker)


def test_what_a_killed_job_left_is_told_and_left(tmp_path: Path) -> None:
    begun = ("60/common.pt", "60/__0_0.distcp")
    saved(
        tmp_path, "20/metadata.json", "40/metadata.json", "80/metadata.json", *begun, tracker="40"
    )
    (tmp_path / "iter_of_mine").mkdir()
    files = sorted(tmp_path.rglob("*"))
    half, later = leftover_lines(given(tmp_path))
    assert half == (
        f"--load {tmp_path}: half written, by a job that ended while it saved: iter_0000060; they "
        "are not loaded, and nothing removes them"
    )
    assert later == (
        f"--load {tmp_path}: iter_0000080 after iteration 40, to which {TRACKER} points; "
        "--ckpt-step 80 would load the last"
    )
    require_complete(given(tmp_path))
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize("names", [("8/mp_rank_00/x.pt",), ("8/.metadata",), ("8/metadata.json",)])
def test_every_format_has_its_own_end(tmp_path: Path, names: tuple[str, ...]) -> None:
    saved(tmp_path, *names, tracker="8")
    require_complete(given(tmp_path))
    assert not list(leftover_lines(given(tmp_path)))


@pytest.mark.parametrize(
    ("names", "tracker", "step", "said"),
    [
        (("8/common.pt", "4/metadata.json"), "8", None, "iter_0000008 is half written, .*: 4$"),
        (("8/common.pt", "8/.metadata"), "8", None, "iter_0000008 is half written, .*: none$"),
        (("4/metadata.json",), "8", None, "iter_0000008 is not there; .* has: 4$"),
        (("4/metadata.json",), "4", 8, "--ckpt-step 8: .*iter_0000008 is not there; .* has: 4$"),
        (("8/common.pt", "4/.metadata"), "4", 8, "--ckpt-step 8: .* is half written, .*: 4$"),
        ((), "4" * 5000, None, "has '4{80}'; expected the iteration"),
        ((), "\x1b[2J", None, r"has '\\x1b\[2J'; expected the iteration"),
        ((), "", None, "has ''; expected the iteration"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    tmp_path: Path, names: tuple[str, ...], tracker: str, step: int | None, said: str
) -> None:
    saved(tmp_path, *names, tracker=tracker)
    with pytest.raises(ValueError, match=said):
        require_complete(given(tmp_path, ckpt_step=step))


def test_weights_of_no_iteration_are_loaded(tmp_path: Path) -> None:
    saved(tmp_path, tracker="release\n")
    require_complete(given(tmp_path))


@pytest.mark.parametrize("own", [False, True])
def test_checkpoints_that_are_not_persistent_have_a_folder(tmp_path: Path, own: bool) -> None:
    load, folder = tmp_path / "load", tmp_path / ("own" if own else "load/non_persistent")
    named = {"non_persistent_global_ckpt_dir": str(folder)} if own else {}
    args = given(load, non_persistent_ckpt_type="global", **named)
    saved(folder, "6/common.pt", "4/metadata.json", tracker="4")
    (half,) = leftover_lines(args)
    assert str(folder) in half and "iter_0000006" in half
    assert sorted(facts_of(args).values()) == ["iteration '4', choices no file", "no checkpoint"]
    assert not resumes(args)
    (load / "epp-choices.json").parent.mkdir(exist_ok=True)
    (load / "epp-choices.json").write_text("{}")
    assert resumes(args) and not resumes(given(load))
    saved(folder, tracker="6")
    with pytest.raises(ValueError, match="iter_0000006 is half written"):
        require_complete(args)


def test_local_checkpoints_hold_the_optimizer_by_rank(tmp_path: Path) -> None:
    how = {"save": str(tmp_path), "use_distributed_optimizer": True}
    local = given(tmp_path, non_persistent_ckpt_type="local", **how)
    require_local(local)
    assert "given now" not in resumable_line(local)
    assert "given now" in resumable_line(given(tmp_path, **how))
    local.dist_ckpt_optim_fully_reshardable = True
    with pytest.raises(ValueError, match="--non-persistent-ckpt-type local with --dist-ckpt"):
        require_local(local)


def test_a_run_goes_on_after_its_last_checkpoint_of_any_kind(corpus: Path, tmp_path: Path) -> None:
    """As killed after iteration 5, in the midst of a save: 2 and 4 are saved, not persistently."""
    folder = tmp_path / "saved"
    places = {"save": folder, "load": folder, "save_interval": 100}
    how = {**ALONE, **OPTIMIZER, **places, "train_iters": 6}
    how |= {"non_persistent_ckpt_type": "global", "non_persistent_save_interval": 2}
    begun = trained(flags(corpus, **how, exit_interval=5), 0)
    shutil.rmtree(folder / "iter_0000005")
    (folder / TRACKER).unlink()
    saved(folder, "5/common.pt")
    resumed = trained(flags(corpus, **how), 0)
    assert resumed.losses[0] == begun.losses[4] and len(resumed.losses) == 2
    assert f"--load {folder}: half written, by a job that ended" in resumed.output
    saved(folder, tracker="5")
    refused(flags(corpus, **how), "iter_0000005 is half written")
    (folder / TRACKER).write_text("five")
    refused(flags(corpus, **how), "has 'five'; expected the iteration")
