"""Training jobs whose ranks, disk, clock or shared memory fail, one at a time.

Others are tests: a killed rank, refused plans and memory in tests/mcore/test_refusals.py,
test_ending.py, test_hardening.py and test_out_of_memory.py, a stopped rank in
tests/runtime/test_watcher.py, a killed or stopped planner in tests/control/test_planner_process.py,
records and folders that cannot be written in tests/control/test_files.py.
"""

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.attack.jobs import Job, Logged, flags, own_mounts, require_same, tmpfs
from tests.mcore.runs import write_corpus

# A plan of these is cut and packed where memory is short.
TOKENS = (129, 12, 40, 7, 90, 33, 64, 5, 101, 18, 128, 26) * 4
LONG = 100_000  # iterations of a job that is not to end by itself

# CLOCK_REALTIME an hour ahead, right and an hour behind in turn, every half second. Other clocks
# do not jump on any machine.
_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static int (*real)(clockid_t, struct timespec *);
static long jump(void) {
    struct timespec steady;
    real(CLOCK_MONOTONIC, &steady);
    return ((steady.tv_sec * 2 + steady.tv_nsec / 500000000) % 3 - 1) * 3600;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += jump();
    return status;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (now) *now = fine.tv_sec;
    return fine.tv_sec;
}
"""


@dataclass
class Undisturbed:
    """One job that nothing happens to: what others must compute, and resume from.

    ``folder`` holds the corpus, ``save``: checkpoints behind iterations 4 and 8, ``record``.
    """

    folder: Path
    _logged: dict[int, Logged] = field(default_factory=dict)

    @property
    def corpus(self) -> Path:
        prefix = self.folder / "documents"
        return prefix if Path(f"{prefix}.idx").exists() else write_corpus(prefix, TOKENS)

    @property
    def logged(self) -> dict[int, Logged]:
        if not self._logged:
            words = flags(
                self.corpus,
                save=self.folder / "save",
                save_interval=4,
                epp_record=self.folder / "record",
            )
            with Job(self.folder, words) as job:
                self._logged = job.require_trained(8)
                job.require_nothing_left()
        return self._logged

    def resumable(self, folder: Path, iteration: int = 4) -> Path:
        """A copy of its checkpoints, ``iteration`` the last one."""
        assert self.logged, "the job that saves them logged nothing"
        shutil.copytree(self.folder / "save", folder)
        for later in folder.glob("iter_*"):
            if int(later.name[5:]) > iteration:
                shutil.rmtree(later)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


# ------------------------------------------------------------------ processes


def test_nothing_happens(undisturbed: Undisturbed) -> None:
    assert sorted(undisturbed.logged) == list(range(1, 9))


def test_sigterm_of_the_job_ends_it_with_a_word(undisturbed: Undisturbed, tmp_path: Path) -> None:
    words = flags(undisturbed.corpus, train_iters=LONG)
    with Job(tmp_path, words, launcher=True) as job:
        job.wait_for_iteration(3)
        job.processes[0].terminate()
        job.wait(90)
        job.require_nothing_left()
        assert "terminated: " in job.said, f"no rank says where it was: {job.last_words()}"


def test_a_rank_stopped_for_10_s_goes_on(undisturbed: Undisturbed, tmp_path: Path) -> None:
    with Job(tmp_path, flags(undisturbed.corpus)) as job:
        job.wait_for_iteration(2)
        rank = job.rank(1)
        os.kill(rank, signal.SIGSTOP)
        time.sleep(10)
        os.kill(rank, signal.SIGCONT)
        require_same(job.require_trained(8), undisturbed.logged)


# ------------------------------------------------------------------ disks


def test_kill_9_in_the_middle_of_a_save_resumes(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """While a checkpoint's tmp_path is there and no file says yet that it is the latest."""
    save = undisturbed.resumable(tmp_path / "save")
    latest = save / "latest_checkpointed_iteration.txt"
    words = flags(undisturbed.corpus, save=save, load=save, save_interval=1)
    for delay in (0.0, 0.05, 0.15):
        with Job(tmp_path, words) as job:

            def saving() -> bool:
                last = int(latest.read_text() or 0)
                return any(int(path.name[5:]) > last for path in save.glob("iter_*"))

            for half in save.glob("iter_*"):  # an earlier strike's
                if int(half.name[5:]) > int(latest.read_text()):
                    shutil.rmtree(half)
            job.wait_for(saving, "save", 240)
            time.sleep(delay)
            for process in job.members():
                os.kill(process, signal.SIGKILL)
    with Job(tmp_path, words) as job:
        require_same(job.require_trained(8), undisturbed.logged)


def test_no_half_checkpoint_of_a_full_disk_is_the_latest(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "full", "size=200k") as full:
        save = full / "save"
        words = flags(undisturbed.corpus, save=save, save_interval=2)
        with Job(tmp_path, words) as job:
            assert any(job.wait(240)), "exit status 0, as if it had saved"
            latest = save / "latest_checkpointed_iteration.txt"
            named = latest.read_text() if latest.exists() else ""
            assert not named, f"checkpoint {named} is named the latest"


def test_saving_on_a_read_only_disk_is_one_line(undisturbed: Undisturbed, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "read-only", "size=1m,ro") as fixed:
        with Job(tmp_path, flags(undisturbed.corpus, save=fixed / "save", save_interval=2)) as job:
            job.require_refusal("--save")


# ------------------------------------------------------------------ the machine


def test_a_job_without_dev_shm_goes_on(undisturbed: Undisturbed, tmp_path: Path) -> None:
    hide = 'mount -t tmpfs -o ro,size=4k none /dev/shm && exec "$@"'
    wrap = [*own_mounts(), "sh", "-c", hide, "sh"]
    with Job(tmp_path, flags(undisturbed.corpus), wrap=wrap) as job:
        require_same(job.require_trained(8), undisturbed.logged)


def test_a_clock_that_jumps_by_an_hour_changes_nothing(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(_CLOCK)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    record = tmp_path / "record"
    words = flags(undisturbed.corpus, epp_record=record)
    with Job(tmp_path, words, environment={"LD_PRELOAD": str(library)}) as job:
        require_same(job.require_trained(8), undisturbed.logged)
    lines = [line for path in record.glob("*.timed") for line in path.read_text().splitlines()]
    times = [float(number) for line in lines if line[:1].isdigit() for number in line.split()[2:4]]
    assert times, "no timed record was read"
    assert min(times) >= 0 and max(times) < 600, f"records from {min(times)} to {max(times)} s"
