"""What ranks read alone, what the environment holds, what Megatron refuses late: one line each."""

import shutil
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_epp.control.files import claim
from megatron_epp.mcore.job.launch_environment import lone_copies, rank_of, require_interface
from megatron_epp.mcore.trainer.host_facts import facts_of
from tests.mcore.runs import flags, trained
from tests.mcore.test_refusals import refused
from tests.programs import ROOT, python

LENGTHS = [30, 40, 50, 60] * 5
ONE = {"pipeline_model_parallel_size": 1, "epp": True}
ELSEWHERE = (str(Path(__file__).with_name("elsewhere.py")),)


# ------------------------------------------------------------------ facts of every rank


def test_a_checkpoint_is_its_iteration_and_its_choices(tmp_path: Path) -> None:
    args = Namespace(load=str(tmp_path), pretrained_checkpoint=None, tokenizer_model=None)
    flag = f"--load {tmp_path}"
    assert facts_of(args) == {flag: "no checkpoint"}
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert facts_of(args) == {flag: "iteration '7', choices no file"}
    (tmp_path / "epp-choices.json").write_text("{}")
    begun = facts_of(args)[flag]
    assert begun.startswith("iteration '7', choices digest ")
    (tmp_path / "epp-choices.json").write_text('{"epp_blend": "tokens"}')
    assert facts_of(args)[flag] != begun


def test_tokenizers_and_files_that_differ_are_seen(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    args = Namespace(tokenizer_model=str(tokenizer), data_args_path=str(tmp_path / "data"))
    seen = []
    for change in ("vocab.json", "model.safetensors", "data"):
        seen.append(facts_of(args))
        (tmp_path / "data" if change == "data" else tokenizer / change).write_text("a")
    seen.append(facts_of(args))
    assert [sorted(facts) for facts in seen[1:]] == [sorted(seen[0])] * 3
    assert [one != two for one, two in pairwise(seen)] == [True, False, True]


CHECKPOINT = {
    "0/saved/latest_checkpointed_iteration.txt": "2",
    "0/saved/iter_0000002/metadata.json": "",
    "0/saved/epp-choices.json": '{"epp_vocab_parallel": "on", "epp_blend": "tokens"}',
}
LOCKED = {"1/saved/epp-job.lock": "process 1 on elsewhere since yesterday"}
SAVE = {"save": "saved", "save_interval": 2}


@pytest.mark.parametrize(
    ("files", "changes", "said"),
    [
        # Megatron's other ranks would load it and wait ten minutes.
        (CHECKPOINT, {"load": "saved"}, ["--load saved: rank 1 on ", ": no checkpoint; rank 0"]),
        # Each would write its part of every checkpoint into a folder of its own.
        pytest.param(
            {}, SAVE, ["--save saved: rank 1 on ", ": no such folder; rank 0 on "],
            marks=pytest.mark.everything,
        ),
        pytest.param(  # a folder of another job, say
            LOCKED, SAVE, ["--save saved: rank 1 on ", ": process 1 on elsewh"],
            marks=pytest.mark.everything,
        ),
        # A rank that alone is refused.
        ({"1/here.idx": None}, {"data_path": "here"}, ["here.idx: ", "(rank 1 on "]),
    ],
)  # fmt: skip
def test_a_rank_with_other_files_is_named(tmp_path, corpus, monkeypatch, files, changes, said):
    """``files``: their text; None: there is none."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{corpus}{suffix}", tmp_path / str(rank) / f"here{suffix}")
    for name, text in files.items():
        if text is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    monkeypatch.setenv("EPP_TEST_FOLDER", str(tmp_path))
    words = flags(corpus, **{"epp": True, **changes})
    refused(words, *said, processes=2, program=ELSEWHERE)


def test_a_second_job_is_kept_out_by_name(corpus, tmp_path) -> None:
    folder = tmp_path / "save"
    (mine,) = claim([("--save", str(folder))])
    words = flags(corpus, **ONE, save=folder, save_interval=1)
    refused(words, f"--save {folder}: another job that still runs writes this folder", "process ")
    mine.close()


def test_a_save_folder_that_cannot_be_made_is_one_line_of_one_rank(corpus, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "ck"
    words = flags(corpus, epp=True, save=folder, save_interval=1)
    refused(words, f"--save {folder}: Not a directory; name a folder", processes=2)


# ------------------------------------------------------------------ the environment


def test_an_interface_that_the_host_does_not_have() -> None:
    for environ in ({}, {"GLOO_SOCKET_IFNAME": ""}, {"GLOO_SOCKET_IFNAME": "lo"}):
        require_interface(environ)
    said = "GLOO_SOCKET_IFNAME='lo,no0' in the environment: expected one of .*lo"
    with pytest.raises(ValueError, match=said):
        require_interface({"GLOO_SOCKET_IFNAME": "lo,no0"})
    # Whoever refuses asks for the rank, also where none is set well.
    assert rank_of({"RANK": "", "WORLD_SIZE": "x"}) == (0, 1) and rank_of({"RANK": "3"}) == (3, 1)


def test_tasks_of_slurm_that_know_nothing_of_each_other() -> None:
    assert "=4 and no RANK in the environment" in (lone_copies({"SLURM_STEP_NUM_TASKS": "4"}) or "")
    for environ in ({}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_NUM_TASKS": "4", "RANK": "0"}):
        assert lone_copies(environ) is None


# ------------------------------------------------------------------ what Megatron refuses late


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two stages whose optimizer's states are of one layout."""
    folder = tmp_path_factory.mktemp("saved") / "saved"
    how = {"use_distributed_optimizer": True, "save": folder, "save_interval": 2}
    run = trained(flags(corpus, epp=True, train_iters=2, **how))
    # At start, and when the first one is saved, here behind the last iteration.
    said = f"--save {folder}: checkpoints resume with the stages and the tensor-parallel degree of"
    first, *_, last = [n for n, line in enumerate(run.output.splitlines()) if said in line]
    assert first < last and run.output.count(said) == 2
    return folder


def test_what_megatron_asserts_of_a_checkpoint_is_one_line(saved: Path, corpus) -> None:
    how = {"epp": True, "load": saved, "use_distributed_optimizer": True}
    wider = flags(corpus, **{**how, "hidden_size": 64, "train_iters": 2})
    refused(wider, "--load: Global shape mismatch", "of the flags' model", processes=2)


def test_a_start_that_megatron_ends_is_no_success(tmp_path, corpus) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "iter_0000002/mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000002/mp_rank_00/model_optim_rng.pt").write_text("no checkpoint")
    refused(flags(corpus, **ONE, load=tmp_path), "--load: Megatron ended at checkpointing.py:")


def test_certify_names_a_megatron_that_it_does_not_know(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise ImportError('it is not to be imported')")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 18\nPATCH = 2\n")
    words = ("-m", "megatron_epp", "certify", "--pp", "2", "--batches", "1")
    done = python(*words, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 2
    assert done.stderr.startswith("megatron_epp: error: certify: this environment's Megatron calls")
    assert "itself 0.18.2; expected 0.19.0 to 0.19.2" in done.stderr
    assert done.stderr.count("\n") == 1
