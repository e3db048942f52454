"""What a job keeps: whole or not at all, by one job at a time, never at the price of training."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_epp.control import files
from megatron_epp.control.files import (
    LOCK_NAME,
    BestEffort,
    claim,
    scratch_folder,
    write_atomically,
)

ROOT = Path(__file__).parents[2]


def test_a_file_is_written_in_a_folder_that_is_made(tmp_path) -> None:
    path = tmp_path / "deep" / "state.txt"
    write_atomically(path, "new \u00e9\n")
    assert path.read_text(encoding="utf-8") == "new \u00e9\n"


def test_what_cannot_be_kept_is_told_once(caplog) -> None:
    def fails() -> None:
        raise OSError(28, "No space left on device")

    keep, kept = BestEffort(), []
    for _ in range(3):
        keep("the records", fails)
        keep("the budgets", lambda: kept.append(1))
    keep("the curves", lambda: 1 / 0)
    assert kept == [1, 1, 1]
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "the records cannot be kept (OSError: [Errno 28] No space left on device)",
        "the curves cannot be kept (ZeroDivisionError: division by zero)",
    ]


OTHER_JOB = """
import sys, time
from megatron_epp.control.files import claim
locks = claim([("--save", sys.argv[1])])
print("mine", flush=True)
time.sleep(60)
"""


def test_a_folder_belongs_to_one_job_that_lives(tmp_path) -> None:
    folder = str(tmp_path / "save")
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_JOB, folder],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "mine\n"
        with pytest.raises(ValueError, match=rf"^--epp-record {folder}: another job .*process "
                           rf"{other.pid} on \S+ since .*name another folder"):  # fmt: skip
            claim([("--save", None), ("--epp-record", folder)], patience_seconds=0.2)
        other.send_signal(signal.SIGKILL)
        other.wait()
        # A dead job holds nothing, and one job may name its folder twice.
        locks = claim([("--save", folder), ("--epp-record", f"{folder}/../save")])
        assert len(locks) == 1
        assert f"process {os.getpid()} " in (tmp_path / "save" / LOCK_NAME).read_text()
        with pytest.raises(ValueError, match="another job that still runs"):
            claim([("--save", folder)], patience_seconds=0)
        locks[0].close()
        claim([("--save", folder)])[0].close()
    finally:
        other.kill()
        other.wait()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^--save .*file/ck: Not a directory; name a folder that"):
        claim([("--save", str(tmp_path / "file" / "ck"))])


LEAVES = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
from megatron_epp.control.files import scratch_folder
with scratch_folder("trial") as folder:
    (folder / "log").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_scratch_folders_of_killed_processes_go(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
        for _ in range(2)
    ]
    try:
        killed, living = (Path(one.stdout.readline().strip()) for one in started)
        started[0].kill()
        started[0].wait()
        assert killed.exists()
        (tmp_path / "megatron_epp-other-1").mkdir()
        with scratch_folder("trial") as mine:
            assert mine.exists()
            assert not killed.exists()
            assert (living / "log").exists()
        assert not mine.exists()
        assert (tmp_path / "megatron_epp-other-1").exists()
    finally:
        for one in started:
            one.kill()
            one.wait()


def test_a_scratch_folder_that_was_removed_before_it_was_locked_is_made_anew(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    removed: list[Path] = []
    lock = files._lock

    def late(file) -> bool:
        if not removed:
            removed.append(Path(file.name).parent)
            shutil.rmtree(removed[0])
        return lock(file)

    monkeypatch.setattr(files, "_lock", late)
    with scratch_folder("trial") as folder:
        assert folder != removed[0]
        assert list(tmp_path.iterdir()) == [folder]
    assert not list(tmp_path.iterdir())
