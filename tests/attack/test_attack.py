"""The attacks attack: a few hold, and each judge is shown what must not pass."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.attack import damaged_files, lines
from tests.attack.command_server import ROOT, CommandServer, Ended
from tests.attack.contract import Attack, GaveWay, Skipped, attempt, expect
from tests.attack.jobs import Job, Logged, require_same
from tests.attack.material import Material, write_corpus


@pytest.fixture(scope="module")
def server():
    with CommandServer() as started:
        yield started


@pytest.fixture(scope="module")
def material(server, tmp_path_factory) -> Material:
    return Material(tmp_path_factory.mktemp("material"), server)


def test_a_few_attacks_hold(server, material, tmp_path) -> None:
    """A tenth of the lines and files; all of them: ``python -m tests.attack``."""
    few = [
        *lines.attacks(server, material, few=True),
        *damaged_files.attacks(server, material, few=True),
    ]
    outcomes = [attempt(attack, tmp_path / str(number)) for number, attack in enumerate(few)]
    assert [outcome.happened for outcome in outcomes if outcome.verdict != "pass"] == []


@pytest.mark.parametrize(
    ("ended", "may", "why"),
    [
        (Ended(2, "", "megatron_epp: error: no\n", 0.1, []), lines.EITHER, None),
        (Ended(0, "yes", "note\n", 0.1, []), lines.EITHER, None),
        (Ended(0, "yes", "", 0.1, []), lines.REFUSED, "accepted"),
        (Ended(2, "", "megatron_epp: error: no\n", 0.1, []), lines.RUNS, "refused"),
        (Ended(2, "", "megatron_epp: error: no\nmore\n", 0.1, []), lines.EITHER, "2 lines"),
        (Ended(2, "", "", 0.1, []), lines.EITHER, "0 lines"),
        (Ended(2, "", "usage: plan\n", 0.1, []), lines.EITHER, "not ours"),
        (Ended(1, "", "Traceback\nKeyError: 3\n", 0.1, []), lines.EITHER, "status 1"),
        (Ended(-9, "", "", 0.1, []), lines.EITHER, "status -9"),
        (Ended(0, "", "x.py:1: RuntimeWarning: overflow\n", 0.1, []), lines.EITHER, "a Warning"),
        (Ended(None, "", "", 60, []), lines.EITHER, "still running"),
        (Ended(0, "", "", 0.1, ["sleep 60"]), lines.EITHER, "left running"),
    ],
)
def test_the_judge_of_command_lines(ended, may, why) -> None:
    found = lines.judge(lines.Line(("plan",), may), ended)
    assert found is None if why is None else why in found


def test_a_line_that_hangs_or_leaves_something_behind_is_seen(server, tmp_path) -> None:
    """The server ends what runs too long, and sees files and processes that stay."""
    endless = tmp_path / "endless.py"
    endless.write_text("import time\ntime.sleep(60)\n")
    assert server.run([str(endless)], entry="file", seconds=0.1).status is None
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text("import subprocess\nsubprocess.Popen(['sleep', '60'])\n")
    left = server.run([str(sleeper)], entry="file")
    assert (left.status, len(left.left)) == (0, 1)
    hungry = tmp_path / "hungry.py"
    hungry.write_text("bytearray(8 << 30)\n")
    assert "MemoryError" in server.run([str(hungry)], entry="file").err


def test_outcomes(tmp_path) -> None:
    def outcome(name: str, run) -> tuple[str, str]:
        found = attempt(Attack("part", name, "", run), tmp_path / name)
        return found.verdict, found.happened

    def gives_way(folder: Path) -> str:
        expect(folder.is_dir(), "no folder")
        raise GaveWay("as it should not")

    def is_skipped(folder: Path) -> str:
        raise Skipped("no root")

    assert outcome("holds", lambda folder: "held") == ("pass", "held")
    assert outcome("gives-way", gives_way) == ("FAIL", "as it should not")
    assert outcome("skipped", is_skipped) == ("skipped", "no root")
    verdict, happened = outcome("breaks", lambda folder: str(1 // 0))
    assert verdict == "FAIL" and "ZeroDivisionError" in happened


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
        assert job.require_refusal("no") == "no"
        assert job.logged() == {1: Logged("4.5E+00", "1.250")}
        with pytest.raises(GaveWay, match=r"left running: .*sleep"):
            job.require_nothing_left(seconds=0.5)
        with pytest.raises(GaveWay, match="does not name"):
            job.require_refusal("--save")
        with pytest.raises(GaveWay, match="exit statuses"):
            job.require_trained(1)
    assert job.members() == {}


def test_numbers_are_compared() -> None:
    mine = {number: Logged("4.5E+00", "1.250") for number in range(1, 5)}
    assert require_same(mine, mine) == "4 iterations as undisturbed"
    other = {**mine, 3: Logged("4.6E+00", "1.250")}
    with pytest.raises(GaveWay, match="iteration 3"):
        require_same(mine, other)
    assert require_same(mine, other, relative=0.1)
    second = {**mine, 2: Logged("4.6E+00", "1.250")}  # the mean of two, as Megatron prints it
    assert require_same(mine, second)
    with pytest.raises(GaveWay, match="no iteration"):
        require_same(mine, {})


def test_the_corpus_is_megatrons(tmp_path) -> None:
    from megatron_epp.corpus.idx_file import examine

    found = examine(str(write_corpus(tmp_path / "corpus", [3, 5, 2])))
    assert found.lengths.tolist() == [3, 5, 2] and found.tokens == 10


def test_the_list(tmp_path) -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "tests.attack", "--part", "training", "--part", "soak", "--list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert listed.returncode == 0, listed.stderr
    assert "SIGTERM of the job" in listed.stdout and "100 iterations" in listed.stdout
