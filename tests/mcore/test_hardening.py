"""Attacks on a job that trains: wrong predictions, records that cannot be written, another job."""

import re
from pathlib import Path

import pytest

from megatron_epp.control.files import claim
from megatron_epp.control.memory_budget import BUDGET_FILE
from tests.mcore.runs import flags, trained
from tests.mcore.test_refusals import ONE, refused

BUDGET_GIB = 0.0006


@pytest.mark.everything
def test_what_was_predicted_too_little_is_learnt_once_and_nothing_of_it_ends_training(
    corpus, tmp_path
) -> None:
    """The analytic cost model predicts a part of what a host holds. The budget was cut again in
    every iteration; and what cannot be kept ended the training."""
    records = tmp_path / "records"
    (records / "errors.txt").mkdir(parents=True)
    (records / BUDGET_FILE).mkdir()
    run = trained(
        flags(corpus, epp=True, train_iters=8, epp_memory_budget_gib=BUDGET_GIB, epp_record=records)
    )
    assert len(run.losses) == 8
    learnt = re.findall(
        r"iteration (\d+) pipeline rank (\d) budget_bytes (\d+) correction ([\d.]+) near",
        run.output,
    )
    assert {rank for _, rank, _, _ in learnt} == {"0", "1"}
    assert {int(budget) for _, _, budget, _ in learnt} == {int(BUDGET_GIB * 2**30)}
    corrections = [float(correction) for _, _, _, correction in learnt]
    assert min(corrections) > 1.5 and max(corrections) < 10
    # Documents differ, so does the error; what is learnt once is not learnt again.
    assert len(learnt) <= 6
    assert all(int(iteration) <= 5 for iteration, _, _, _ in learnt)
    cut = [f"{records}/{BUDGET_FILE}, cannot be kept", f"--epp-record {records} cannot be kept"]
    for words in cut:
        assert run.output.count(words) == 1, run.output


def test_a_second_job_is_kept_out_by_name(corpus, tmp_path) -> None:
    folder = tmp_path / "save"
    (mine,) = claim([("--save", str(folder))])
    words = flags(corpus, **ONE, save=folder, save_interval=1)
    refused(words, f"--save {folder}: another job that still runs writes this folder", "process ")
    mine.close()


def test_a_save_folder_that_cannot_be_made_is_one_line_of_one_rank(corpus, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    folder = Path(tmp_path / "file" / "ck")
    words = flags(corpus, epp=True, save=folder, save_interval=1)
    refused(words, f"--save {folder}: Not a directory; name a folder", processes=2)
