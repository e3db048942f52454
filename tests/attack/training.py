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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.attack.contract import Attack, Skipped, expect
from tests.attack.jobs import Job, Logged, flags, own_mounts, require_same, tmpfs
from tests.attack.material import write_corpus

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
        if not self.logged:  # the job that saves them
            raise Skipped("nothing was logged")
        shutil.copytree(self.folder / "save", folder)
        for later in folder.glob("iter_*"):
            if int(later.name[5:]) > iteration:
                shutil.rmtree(later)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return folder


def attacks(folder: Path) -> list[Attack]:
    undisturbed = Undisturbed(folder)
    folder.mkdir(parents=True, exist_ok=True)

    def attack(name: str, expected: str, run: Callable[[Undisturbed, Path], str]) -> Attack:
        return Attack("training", name, expected, lambda own: run(undisturbed, own))

    same = "goes on, undisturbed numbers"
    return [
        attack("nothing", "8 iterations, nothing left", _nothing),
        attack("SIGTERM of the job", "ends with a word, nothing left", _terminate),
        attack("a rank stopped for 10 s", same, _stop_and_continue),
        attack(
            "kill -9 in the middle of a save, 3 times", "resumes, undisturbed numbers", _kill_a_save
        ),
        attack(
            "--save on a full disk", "no half checkpoint is named the latest", _save_on_a_full_disk
        ),
        attack("--save on a read-only disk", "one line, status 2", _save_read_only),
        attack("no /dev/shm", same, _no_shared_memory),
        attack("a clock that jumps by an hour", same, _jumping_clock),
    ]


# ------------------------------------------------------------------ processes


def _nothing(undisturbed: Undisturbed, folder: Path) -> str:
    return f"loss {undisturbed.logged[1].loss} to {undisturbed.logged[8].loss}"


def _terminate(undisturbed: Undisturbed, folder: Path) -> str:
    words = flags(undisturbed.corpus, train_iters=LONG)
    with Job(folder, words, launcher=True) as job:
        job.wait_for_iteration(3)
        job.processes[0].terminate()
        (status,) = job.wait(90)
        job.require_nothing_left()
        expect("terminated: " in job.said, f"no rank says where it was: {job.last_words()}")
        return f"exit status {status}, nothing left, ranks say where they were"


def _stop_and_continue(undisturbed: Undisturbed, folder: Path) -> str:
    with Job(folder, flags(undisturbed.corpus)) as job:
        job.wait_for_iteration(2)
        rank = job.rank(1)
        os.kill(rank, signal.SIGSTOP)
        time.sleep(10)
        os.kill(rank, signal.SIGCONT)
        return require_same(job.require_trained(8), undisturbed.logged)


# ------------------------------------------------------------------ disks


def _kill_a_save(undisturbed: Undisturbed, folder: Path) -> str:
    """While a checkpoint's folder is there and no file says yet that it is the latest."""
    save = undisturbed.resumable(folder / "save")
    latest = save / "latest_checkpointed_iteration.txt"
    words = flags(undisturbed.corpus, save=save, load=save, save_interval=1)
    struck = []
    for delay in (0.0, 0.05, 0.15):
        with Job(folder, words) as job:

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
            struck.append(latest.read_text())
    with Job(folder, words) as job:
        logged = job.require_trained(8)
        return f"struck at {' '.join(struck)}; {require_same(logged, undisturbed.logged)}"


def _save_on_a_full_disk(undisturbed: Undisturbed, folder: Path) -> str:
    with tmpfs(folder / "full", "size=200k") as full:
        save = full / "save"
        words = flags(undisturbed.corpus, save=save, save_interval=2)
        with Job(folder, words) as job:
            statuses = job.wait(240)
            expect(any(statuses), "exit status 0, as if it had saved")
            latest = save / "latest_checkpointed_iteration.txt"
            named = latest.read_text() if latest.exists() else ""
            expect(not named, f"checkpoint {named} is named the latest")
            return f"exit statuses {statuses}, no checkpoint is named the latest"


def _save_read_only(undisturbed: Undisturbed, folder: Path) -> str:
    with tmpfs(folder / "read-only", "size=1m,ro") as fixed:
        with Job(folder, flags(undisturbed.corpus, save=fixed / "save", save_interval=2)) as job:
            return job.require_refusal("--save")


# ------------------------------------------------------------------ the machine


def _no_shared_memory(undisturbed: Undisturbed, folder: Path) -> str:
    hide = 'mount -t tmpfs -o ro,size=4k none /dev/shm && exec "$@"'
    wrap = [*own_mounts(), "sh", "-c", hide, "sh"]
    with Job(folder, flags(undisturbed.corpus), wrap=wrap) as job:
        return require_same(job.require_trained(8), undisturbed.logged)


def _jumping_clock(undisturbed: Undisturbed, folder: Path) -> str:
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_CLOCK)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Skipped("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    record = folder / "record"
    words = flags(undisturbed.corpus, epp_record=record)
    with Job(folder, words, environment={"LD_PRELOAD": str(library)}) as job:
        same = require_same(job.require_trained(8), undisturbed.logged)
    lines = [line for path in record.glob("*.timed") for line in path.read_text().splitlines()]
    times = [float(number) for line in lines if line[:1].isdigit() for number in line.split()[2:4]]
    expect(bool(times), "no timed record was read")
    expect(min(times) >= 0 and max(times) < 600, f"records from {min(times)} to {max(times)} s")
    return f"{same}; records from {min(times):.1f} to {max(times):.1f} s"
