"""Training jobs whose ranks, planner, disk, clock, memory or data fail, one at a time."""

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
WORD_SECONDS = 75.0  # after which a user must have been told what a job waits for

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
    word = "ends with a word, nothing left"
    line = "one line, status 2"
    return [
        attack("nothing", "8 iterations, nothing left", _nothing),
        attack("kill -9 of a rank", word, _kill_a_rank),
        attack("SIGTERM of the job", word, _terminate),
        attack("a rank stopped for good", "named within 75 s, ended by the timeout", _stop_a_rank),
        attack("a rank stopped for 10 s", same, _stop_and_continue),
        attack("kill -9 of the planner, 3 times", same, _kill_the_planner),
        attack("the planner stopped", "a word within 75 s, goes on", _stop_the_planner),
        attack(
            "kill -9 in the middle of a save, 3 times", "resumes, undisturbed numbers", _kill_a_save
        ),
        attack("--epp-record on a full disk", same, _record_on_a_full_disk),
        attack(
            "--save on a full disk", "no half checkpoint is named the latest", _save_on_a_full_disk
        ),
        attack("--save and --epp-record below a file", line, _save_below_a_file),
        attack("--save on a read-only disk", line, _save_read_only),
        attack("two jobs, one folder", "the second is refused, a later one not", _two_jobs),
        attack("out of memory in every iteration", "ends with one line, or trains", _out_of_memory),
        attack(
            "a budget that is predicted wrong", "the budget does not collapse", _wrong_prediction
        ),
        attack("plans of other degrees after a resume", line, _plans_that_do_not_fit),
        attack("documents of other lengths on one node", line, _other_lengths),
        attack(
            "documents of other tokens on one node", "refused, or said to be unseen", _other_tokens
        ),
        attack("no /dev/shm", same, _no_shared_memory),
        attack("a clock that jumps by an hour", same, _jumping_clock),
    ]


# ------------------------------------------------------------------ processes


def _nothing(undisturbed: Undisturbed, folder: Path) -> str:
    return f"loss {undisturbed.logged[1].loss} to {undisturbed.logged[8].loss}"


def _kill_a_rank(undisturbed: Undisturbed, folder: Path) -> str:
    words = flags(undisturbed.corpus, train_iters=LONG)
    with Job(folder, words, launcher=True) as job:
        job.wait_for_iteration(3)
        os.kill(job.rank(1), signal.SIGKILL)
        (status,) = job.wait(90)
        expect(status != 0, "exit status 0")
        job.require_nothing_left()
        return f"exit status {status}, nothing left"


def _terminate(undisturbed: Undisturbed, folder: Path) -> str:
    words = flags(undisturbed.corpus, train_iters=LONG)
    with Job(folder, words, launcher=True) as job:
        job.wait_for_iteration(3)
        job.processes[0].terminate()
        (status,) = job.wait(90)
        job.require_nothing_left()
        expect("terminated: " in job.said, f"no rank says where it was: {job.last_words()}")
        return f"exit status {status}, nothing left, ranks say where they were"


def _stop_a_rank(undisturbed: Undisturbed, folder: Path) -> str:
    words = flags(undisturbed.corpus, train_iters=LONG, distributed_timeout_minutes=1)
    with Job(folder, words) as job:
        job.wait_for_iteration(3)
        before = len(job.said)
        os.kill(job.rank(1), signal.SIGSTOP)
        stopped = time.monotonic()

        def named() -> bool:
            return "waited for" in job.said[before:] or "waits for" in job.said[before:]

        job.wait_for(named, "word of what is waited for", WORD_SECONDS)
        told = time.monotonic() - stopped
        job.wait_for(lambda: job.processes[0].poll() is not None, "end of the other rank", 120)
        ended = time.monotonic() - stopped
        expect(job.processes[0].returncode != 0, "exit status 0")
        return f"named after {told:.0f} s, ended after {ended:.0f} s"


def _stop_and_continue(undisturbed: Undisturbed, folder: Path) -> str:
    with Job(folder, flags(undisturbed.corpus)) as job:
        job.wait_for_iteration(2)
        rank = job.rank(1)
        os.kill(rank, signal.SIGSTOP)
        time.sleep(10)
        os.kill(rank, signal.SIGCONT)
        return require_same(job.require_trained(8), undisturbed.logged)


def _kill_the_planner(undisturbed: Undisturbed, folder: Path) -> str:
    """Plans that packing made meanwhile add up in another order: losses may differ."""
    with Job(folder, flags(undisturbed.corpus, train_iters=60)) as job:
        killed = 0
        for number in (2, 4, 6):
            job.wait_for_iteration(number)
            if (planner := job.planner()) is not None:
                os.kill(planner, signal.SIGKILL)
                killed += 1
        expect(killed > 0, "there was no planner to kill")
        logged = job.require_trained(60)
        job.require_nothing_left()
        return f"{killed} killed, {require_same(logged, undisturbed.logged, 1e-4)}"


def _stop_the_planner(undisturbed: Undisturbed, folder: Path) -> str:
    with Job(folder, flags(undisturbed.corpus, train_iters=60)) as job:
        job.wait_for_iteration(2)
        planner = job.planner()
        expect(planner is not None, "there is no planner to stop")
        os.kill(planner, signal.SIGSTOP)
        stopped, before = time.monotonic(), len(job.said)
        job.wait_for(
            lambda: "plan" in job.said[before:].replace("megatron_epp.planner", "").lower(),
            "word of the plan that is waited for",
            WORD_SECONDS,
        )
        told = time.monotonic() - stopped
        os.kill(planner, signal.SIGCONT)
        logged = job.require_trained(60)
        same = require_same(logged, undisturbed.logged, 1e-4)
        return f"said after {told:.0f} s; continued: {same}"


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


def _record_on_a_full_disk(undisturbed: Undisturbed, folder: Path) -> str:
    with tmpfs(folder / "full", "size=24k") as full:
        words = flags(undisturbed.corpus, epp_record=full / "record")
        with Job(folder, words) as job:
            logged = job.require_trained(8)
            warnings = [line for line in job.said.splitlines() if "No space left" in line]
            expect(bool(warnings), "not a word of what was not recorded")
            expect(len(warnings) < 4, f"{len(warnings)} lines of it")
            return f"{require_same(logged, undisturbed.logged)}; {warnings[0][-80:]}"


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


def _save_below_a_file(undisturbed: Undisturbed, folder: Path) -> str:
    file = folder / "file"
    file.write_text("")
    with Job(folder, flags(undisturbed.corpus, save=file / "save", save_interval=2)) as job:
        saved = job.require_refusal("--save")
    with Job(folder, flags(undisturbed.corpus, epp_record=file / "record")) as job:
        return f"{saved}; {job.require_refusal('--epp-record')}"


def _save_read_only(undisturbed: Undisturbed, folder: Path) -> str:
    with tmpfs(folder / "read-only", "size=1m,ro") as fixed:
        with Job(folder, flags(undisturbed.corpus, save=fixed / "save", save_interval=2)) as job:
            return job.require_refusal("--save")


def _two_jobs(undisturbed: Undisturbed, folder: Path) -> str:
    shared = {"save": folder / "save", "epp_record": folder / "record", "save_interval": 1000}
    words = flags(undisturbed.corpus, train_iters=LONG, **shared)
    with Job(folder, words) as first:
        first.wait_for_iteration(1)
        with Job(folder, [*words, "--seed", "7"]) as second:
            said = second.require_refusal(str(folder))
        expect(all(p.poll() is None for p in first.processes), "the first job ended, too")
        for process in first.members():
            os.kill(process, signal.SIGKILL)
    with Job(folder, flags(undisturbed.corpus, **shared)) as later:
        later.require_trained(8)
    return f"{said}; after the first's death the folder is free"


# ------------------------------------------------------------------ memory


def _out_of_memory(undisturbed: Undisturbed, folder: Path) -> str:
    with Job(folder, flags(undisturbed.corpus, epp_memory_limit_gib=3e-4)) as job:
        statuses = job.wait(240)
        repeats = job.said.count("out of memory")
        if not any(statuses):
            return f"trained, {repeats} times out of memory"
        expect(set(statuses) == {2}, f"exit statuses {statuses}: {job.last_words()}")
        expect(len(job.errors) == 1, f"{len(job.errors)} lines of ours: {job.errors[:2]}")
        return f"{repeats} times out of memory, then: {job.errors[0][-160:]}"


def _wrong_prediction(undisturbed: Undisturbed, folder: Path) -> str:
    """The analytic model foretells several times too little on a CPU."""
    record = folder / "record"
    words = flags(
        undisturbed.corpus,
        seq_length=128,
        train_iters=30,
        epp_memory_budget_gib=5e-4,
        epp_record=record,
    )
    with Job(folder, words) as job:
        job.require_trained(30)
        chunks = [
            path.read_text().count("chunk ") for path in sorted(record.glob("iteration-*.step"))
        ]
        late = max(chunks[20:])
        once = max(chunks[:6])
        expect(late <= 2 * once, f"chunks an iteration: {chunks}")
        return f"at most {once} chunks in iterations 1 to 6, {late} in 21 to 30"


# ------------------------------------------------------------------ data and plans


def _plans_that_do_not_fit(undisturbed: Undisturbed, folder: Path) -> str:
    save = undisturbed.resumable(folder / "save")
    words = flags(
        undisturbed.corpus,
        pipeline_model_parallel_size=1,
        load=save,
        epp_plan=undisturbed.folder / "record",
    )
    said = []
    for ranks in (1, 2):  # one stage, and two replicas of one
        with Job(folder, words, ranks=ranks) as job:
            said.append(job.require_refusal())
    return "; ".join(said)


def _other_lengths(undisturbed: Undisturbed, folder: Path) -> str:
    said = _two_nodes(folder, TOKENS, (*TOKENS[:5], TOKENS[5] + 1, *TOKENS[6:]), 0)
    expect(said is not None, "trained on two corpora without a word")
    return str(said)


def _other_tokens(undisturbed: Undisturbed, folder: Path) -> str:
    said = _two_nodes(folder, TOKENS, TOKENS, 1)
    if said is None:
        return "trains: the lengths are equal, and tokens are not compared"
    return said


def _two_nodes(folder: Path, one: tuple, other: tuple, seed: int) -> str | None:
    """Two nodes whose flags are the same and whose files are not; None: they trained."""
    homes = [folder / "node-0", folder / "node-1"]
    write_corpus(homes[0] / "documents", one)
    write_corpus(homes[1] / "documents", other, seed=seed)
    with Job(folder, flags("documents", pipeline_model_parallel_size=1), cwd=homes) as job:
        if job.wait(240) == [0, 0]:
            return None
        return job.require_refusal("same lengths")


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
