"""An iteration that the fallback planned is planned so again by a run that is resumed before it."""

import shutil
from pathlib import Path

import pytest

from megatron_epp.ir import Step
from megatron_epp.mcore.fallbacks import FILE_NAME, Fallbacks
from tests.mcore.runs import flags, train, write_corpus

LENGTHS = [97, 3, 40, 120, 9, 12, 65, 30, 2, 128, 129, 21, 5, 77, 18, 110, 33, 8, 61, 11]


def test_fallbacks_are_kept_and_read_again(tmp_path) -> None:
    ours = Fallbacks([str(tmp_path / "a"), str(tmp_path / "b")])
    assert ours.of(7) is None
    assert not (tmp_path / "a").exists()
    ours.add(12, "packing", "it was\nkilled")
    ours.add(7, "packing", "")
    text = (tmp_path / "b" / FILE_NAME).read_text()
    assert text == (
        "iteration 7 planner packing no reason\niteration 12 planner packing it was killed\n"
    )
    again = Fallbacks([str(tmp_path / "c")], str(tmp_path / "a"))
    assert (again.of(7), again.of(8), again.of(12)) == ("packing", None, "packing")
    assert (tmp_path / "c" / FILE_NAME).read_text() == text
    # A run that resumes nothing forgets what another left in its folder.
    Fallbacks([str(tmp_path / "c")])
    assert Fallbacks([], str(tmp_path / "c")).of(7) is None


def test_a_damaged_file_is_named_with_its_line(tmp_path) -> None:
    (tmp_path / FILE_NAME).write_text("iteration 7 planner packing died\niteration 0 no\n")
    with pytest.raises(ValueError, match=rf"{FILE_NAME}, line 2: 'iteration 0 no' is no fallback"):
        Fallbacks([], str(tmp_path))


def test_a_resumed_run_repeats_the_fallback(tmp_path) -> None:
    corpus = write_corpus(tmp_path / "documents", LENGTHS)
    # Dropout draws by the chunk: another plan, another loss.
    common = {"epp": True, "train_iters": 4, "hidden_dropout": 0.1, "save_interval": 1}
    first, again = tmp_path / "first", tmp_path / "again"
    died = train(
        flags(corpus, **common, save=first, epp_record=first / "plans"),
        program=(str(Path(__file__).parent / "deadly.py"),),
    )
    assert died.status == 0, died.output
    assert "iteration 2: the planner failed (the planner process has ended)" in died.output
    assert Fallbacks([], str(first)).of(2) == "packing"

    resumed = train(
        flags(corpus, **common, load=first, ckpt_step=1, save=again, epp_record=again / "plans")
    )
    assert resumed.status == 0, resumed.output
    assert "iteration 2: planned by packing, as before the resume" in resumed.output
    assert Fallbacks([], str(again)).of(2) == "packing"
    planners = []
    for iteration in (2, 3, 4):
        name = f"iteration-00000{iteration}.step"
        before, now = ((folder / "plans" / name).read_text() for folder in (first, again))
        assert before == now
        planners += [plan.predicted.planner for plan in Step.parse(now).plans]
    assert planners == ["packing", "epp", "epp"]
    assert resumed.grad_norms == died.grad_norms[1:]
    assert resumed.losses[-1] == died.losses[-1]

    # Without the file the planner, which lives, is asked.
    (first / FILE_NAME).unlink()
    shutil.rmtree(again)
    forgot = train(flags(corpus, **common, load=first, ckpt_step=1, epp_record=again / "plans"))
    assert forgot.status == 0, forgot.output
    assert forgot.grad_norms != died.grad_norms[1:]
