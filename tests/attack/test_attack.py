"""The attacks attack: a few hold, and each check is shown what must not pass."""

import pytest

from tests.attack import lines
from tests.attack.commands import Ended, run
from tests.attack.damaged_files import damaged
from tests.attack.jobs import Job, Logged, require_same

pytestmark = pytest.mark.everything


# Slow: twice as many.
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_few_lines_hold(material, tmp_path, every: int) -> None:
    """All of them, as of the damaged files: ``python -m tests.attack``."""
    some = [*lines.odd_numbers(material)][:: 12 * every]
    some += [*lines.odd_words(material)][:: 3 * every]
    lines.run_lines(some, tmp_path)


@pytest.mark.parametrize("name", ["good.plan", "corpus.idx"])
def test_a_few_damaged_files_hold(material, tmp_path, name: str) -> None:
    lines.run_lines(list(damaged(material, name, tmp_path, every=5)), tmp_path)


@pytest.mark.parametrize(
    ("ended", "may", "why"),
    [
        (Ended(2, "", "megatron_epp: error: no\n", []), lines.EITHER, None),
        (Ended(0, "yes", "note\n", []), lines.EITHER, None),
        (Ended(0, "yes", "", []), lines.REFUSED, "accepted"),
        (Ended(2, "", "megatron_epp: error: no\n", []), lines.RUNS, "refused"),
        (Ended(2, "", "megatron_epp: error: no\nmore\n", []), lines.EITHER, "2 lines"),
        (Ended(2, "", "", []), lines.EITHER, "0 lines"),
        (Ended(2, "", "usage: plan\n", []), lines.EITHER, "not ours"),
        (Ended(1, "", "Traceback\nKeyError: 3\n", []), lines.EITHER, "status 1"),
        (Ended(-9, "", "", []), lines.EITHER, "status -9"),
        (Ended(0, "", "x.py:1: RuntimeWarning: overflow\n", []), lines.EITHER, "a Warning"),
        (Ended(None, "", "", []), lines.EITHER, "still running"),
        (Ended(0, "", "", ["sleep 60"]), lines.EITHER, "left running"),
    ],
)
def test_the_judge_of_command_lines(ended, may, why) -> None:
    found = lines.judge(lines.Line(("plan",), may), ended)
    assert found is None if why is None else why in found


def test_a_line_that_hangs_or_leaves_something_behind_is_seen(tmp_path) -> None:
    """What runs too long is ended, and processes that stay are seen."""
    endless = tmp_path / "endless.py"
    endless.write_text("import time\ntime.sleep(60)\n")
    assert run([], program=(str(endless),), seconds=0.05).status is None
    busy = tmp_path / "busy.py"
    busy.write_text("while True: pass\n")
    assert run([], program=(str(busy),), seconds=1).status is None
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text("import subprocess\nsubprocess.Popen(['sleep', '60'])\n")
    left = run([], program=(str(sleeper),), grace_seconds=0.5)
    assert (left.status, len(left.left)) == (0, 1)
    hungry = tmp_path / "hungry.py"
    hungry.write_text("bytearray(8 << 30)\n")
    assert "MemoryError" in run([], program=(str(hungry),)).err


def test_a_job_is_watched_to_its_end(tmp_path, monkeypatch) -> None:
    """Shown a stand-in for the trainer: what is left, its numbers, how it ended."""
    trainer = tmp_path / "trainer.py"
    trainer.write_text(
        "import os, subprocess, sys, tempfile, time\n"
        "print(' iteration        1/ 3 | lm loss: 4.5E+00 | x | grad norm: 1.250 |', flush=True)\n"
        "if os.environ['RANK'] == '1': subprocess.Popen(['sleep', '60'])\n"
        "print('megatron_epp: error: no') if os.environ['RANK'] == '0' else None\n"
        "sys.exit(2)\n"
    )
    monkeypatch.setattr("tests.attack.jobs.MODULE", [str(trainer)])
    with Job(tmp_path, []) as job:
        job.require_refusal("no")
        assert job.logged() == {1: Logged("4.5E+00", "1.250")}
        with pytest.raises(AssertionError, match=r"left running: .*sleep"):
            job.require_nothing_left(seconds=0.5)
        with pytest.raises(AssertionError, match="does not name"):
            job.require_refusal("--save")
        with pytest.raises(AssertionError, match="exit statuses"):
            job.require_trained(1)
    assert job.members() == {}


def test_numbers_are_compared() -> None:
    mine = {number: Logged("4.5E+00", "1.250") for number in range(1, 5)}
    require_same(mine, mine)
    other = {**mine, 3: Logged("4.6E+00", "1.250")}
    with pytest.raises(AssertionError, match="iteration 3"):
        require_same(mine, other)
    require_same(mine, other, relative=0.1)
    second = {**mine, 2: Logged("4.6E+00", "1.250")}  # the mean of two, as Megatron prints it
    require_same(mine, second)
    with pytest.raises(AssertionError, match="no iteration"):
        require_same(mine, {})
