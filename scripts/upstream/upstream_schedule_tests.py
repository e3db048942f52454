#!/usr/bin/env python3
"""Megatron-LM's own tests of its schedules, run with this project's schedule in their place.

    git clone --branch core_v0.19.0 --depth 1 https://github.com/NVIDIA/Megatron-LM
    scripts/upstream/upstream_schedule_tests.py --megatron Megatron-LM

The script runs the checkout's unit tests that call a schedule, or pack sequences for a schedule
(TESTS), in the number of processes that they need, on CPUs or GPUs: first unchanged, then with
megatron_epp.install_schedule. For every file, it prints how many tests ran and passed, how many of
these passed with this project's schedule, and how many called it. It fails if a test passes only
with Megatron's own schedule. The checkout must have the version of the installed megatron-core (the
tests of 0.19.2 are those of 0.19.0). No code of it is copied into this project. On a
host without a GPU, some tests fail unchanged, because Transformer Engine or bf16 kernels are
missing, or are skipped; the script lists these tests.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
# By file, the processes that they want.
TESTS = {
    "tests/unit_tests/pipeline_parallel/test_schedules.py": 8,
    "tests/unit_tests/pipeline_parallel/test_pipeline_layout.py": 8,
    "tests/unit_tests/pipeline_parallel/test_multimodule_schedules.py": 8,
    "tests/unit_tests/models/mimo/test_mimo_1f1b_schedule.py": 8,
    "tests/unit_tests/models/mimo/test_mimo_colocated_correctness.py": 8,
    "tests/unit_tests/resharding/test_model_swap.py": 8,
    "tests/unit_tests/rl/test_rl_utils.py": 4,
    "tests/unit_tests/rl/test_sequence_packing_utils.py": 1,
    "tests/unit_tests/data/test_get_batch.py": 1,
    "tests/unit_tests/transformer/test_attention_packed_seq.py": 1,
    "tests/unit_tests/transformer/test_thd_correctness.py": 1,
    "tests/unit_tests/transformer/test_full_cuda_graph.py": 1,
}
MOST_RANKS = 8
# Those make groups of other ranks under one name. NCCL meets when a group first speaks; gloo at
# once, where such groups may take each other's ranks for their own and wait for ever.
WITHOUT_GPU = "not custom_pgs"
# What Megatron-LM's reinforcement learning imports for servers and logs, where it is not installed.
ABSENT = ("wandb", "httpx", "fastapi", "uvicorn", "openai", "zmq", "msgpack")
# Loaded by pytest in every process, before the tests import Megatron. gloo stands in for NCCL, and
# the installed megatron-core for the checkout's, which is not built; what the wheel lacks
# (megatron.rl, entry scripts) is the checkout's.
PLUGIN = """
import importlib.abc, importlib.util, os, sys
from unittest.mock import MagicMock
sys.path.insert(0, {root!r})
sys.path.append({checkout!r})

class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        module = MagicMock()
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass

sys.meta_path.append(Absent())
from megatron_epp.mcore.patching import cpu_host

try:
    without_gpu = cpu_host.install_cpu_host()
except ValueError:  # by a seam of the trainer, which is for another release; the rest is in place
    without_gpu = True
if without_gpu:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.cuda.device_count = lambda: {ranks}
    torch.cuda.memory.empty_cache = lambda: None
    init, new_group = dist.init_process_group, dist.new_group

    def init_process_group(backend=None, **others):
        return init("gloo", **others)

    def new(ranks=None, timeout=None, backend=None, pg_options=None, **others):
        return new_group(ranks, timeout=timeout, backend="gloo", **others)

    torch.distributed.init_process_group = dist.init_process_group = init_process_group
    torch.distributed.new_group = dist.new_group = new
import megatron.core.pipeline_parallel.schedules
CALLS = dict.fromkeys(("planned", "left"), 0)
if os.environ["EPP_STANDS_IN"] == "1":
    import megatron_epp
    from megatron_epp.mcore.loops.loop_schedule import LoopSchedule
    from megatron_epp.mcore.loops.planned_call import PlannedCall

    megatron_epp.install_schedule()

    def counted(schedule, name, what):
        plain = getattr(schedule, name)

        def method(*arguments):
            CALLS[what] += 1
            return plain(*arguments)

        setattr(schedule, name, method)

    counted(PlannedCall, "run", "planned")
    counted(LoopSchedule, "_leave", "left")

def pytest_runtest_teardown(item):
    if any(CALLS.values()) and os.environ.get("RANK", "0") == "0":
        with open({called!r}, "a") as file:
            file.write(f"{{item.name}} {{CALLS['planned']}} {{CALLS['left']}}\\n")
    CALLS.update(planned=0, left=0)
"""
# Stands in for pytest-mock, which this project does not need.
MOCKER = """
from unittest.mock import patch
import pytest

@pytest.fixture
def mocker():
    class Mocker:
        started = []
        def patch(self, *names, **values):
            self.started.append(patch(*names, **values))
            return self.started[-1].start()
    made = Mocker()
    yield made
    while made.started:
        made.started.pop().stop()
"""
_VERDICT = re.compile(r"^(\S+\.py)::(\S+) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)", re.MULTILINE)
_REASON = re.compile(r"^(?:FAILED|ERROR) (\S+\.py)::(\S+) - (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of the tests of a file on rank 0.

    ``of`` is the result of each test in a few words. ``called`` are the numbers of calls in this
    project's schedule, and of calls left to Megatron's own schedule, for each test.
    """

    of: dict[str, str]
    called: dict[str, tuple[int, int]]

    def passed(self) -> set[str]:
        return {name for name, verdict in self.of.items() if verdict == "PASSED"}


def run(checkout: Path, tests: str, stands_in: bool, chosen: argparse.Namespace) -> Outcome:
    """Run the tests of a file, and return their results."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        called = home / "called"
        plugin = PLUGIN.format(
            root=str(ROOT), checkout=str(checkout), absent=ABSENT, ranks=MOST_RANKS,
            called=str(called),
        )  # fmt: skip
        (home / "stands_in.py").write_text(plugin)
        if find_spec("pytest_mock") is None:
            (home / "pytest_mock.py").write_text(MOCKER)
        # The checkout's tests are a package of their own; its megatron is not to be imported.
        (home / "tests").symlink_to(checkout / "tests")
        front = filter(None, [os.environ.get("PYTHONPATH")])  # another Megatron, if there is one
        environment = {
            **os.environ,
            "EPP_STANDS_IN": str(int(stands_in)),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(home), *front, str(ROOT)]),
        }
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(TESTS.get(tests, MOST_RANKS)),
            "--redirects", "3", "--log-dir", str(home / "logs"),
            "-m", "pytest", "-v", "-rA", "-p", "stands_in", "-p", "no:cacheprovider",
            "--noconftest", "--rootdir", str(home),
            "-o", "addopts=", str(home / tests),
        ]  # fmt: skip
        if chosen.only:
            command += ["-k", chosen.only]
        launched = subprocess.Popen(
            command, cwd=home, env=environment, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            launched.wait(chosen.timeout)
        except subprocess.TimeoutExpired:
            whose = "with ours" if stands_in else "as they are"
            print(f"{tests} {whose}: not done in {chosen.timeout:.0f} s; what was said by then:")
        finally:
            launched.terminate()  # torchrun ends its processes, each in a session of its own
            launched.wait()
        logs = sorted((home / "logs").rglob("0/stdout.log"))
        said = logs[0].read_text(errors="replace") if logs else ""
        if not _VERDICT.search(said):
            print("\n".join(line for line in said.splitlines() if "Error" in line)[-500:])
        found = {name: verdict for _, name, verdict in _VERDICT.findall(said)}
        for _, name, reason in _REASON.findall(said):
            found[name] = f"{found.get(name, 'ERROR')}: {reason}"
        lines = called.read_text().splitlines() if called.exists() else []
        counts = (line.rsplit(" ", 2) for line in lines)
        return Outcome(found, {name: (int(own), int(left)) for name, own, left in counts})


def compare(checkout: Path, tests: str, chosen: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return a table row, and the tests that pass only without this project's schedule."""
    before, after = (run(checkout, tests, stands_in, chosen) for stands_in in (False, True))
    print(tests)
    # Cases of one test that end alike are one line.
    lines: Counter[tuple[str, str, str]] = Counter()
    for name, verdict in before.of.items():
        ours = after.of.get(name, "did not run")
        lines[name.partition("[")[0], verdict, "the same" if ours == verdict else ours] += 1
    width = max((len(name) for name, _, _ in lines), default=0)
    for (name, verdict, ours), count in lines.items():
        times = f" x {count}" if count > 1 else ""
        print(f"  {name.ljust(width)}  {verdict[:150]}{times}; with ours: {ours[:150]}")
    passed = before.passed()
    worse = sorted(passed - after.passed())
    called = {name for name, (own, _) in after.called.items() if own}
    left = {name for name, (own, of_megatron) in after.called.items() if of_megatron and not own}
    ended = [verdict for verdict in before.of.values() if not verdict.startswith("SKIPPED")]
    cells = [
        Path(tests).name, len(before.of), len(ended), len(passed), len(passed) - len(worse),
        len(called), len(left),
    ]  # fmt: skip
    print("  " + ", ".join(f"{name} {cell}" for name, cell in zip(HEAD, cells, strict=True)))
    sys.stdout.flush()
    return [str(cell) for cell in cells], worse


HEAD = (
    "file",
    "tests",
    "not skipped",
    "pass as they are",
    "of these, pass with ours",
    "ran by our plans",
    "left to Megatron's",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--megatron", required=True, type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="files of the checkout")
    parser.add_argument(
        "-k",
        dest="only",
        default="" if torch.cuda.is_available() else WITHOUT_GPU,
        help=f"pytest's: tests of these names alone (without a GPU: {WITHOUT_GPU!r})",
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds, of every run")
    chosen = parser.parse_args()
    checkout = chosen.megatron.resolve()
    for tests in chosen.tests:
        if not (checkout / tests).exists():
            print(f"--megatron {chosen.megatron}: holds no {tests}", file=sys.stderr)
            return 2
    rows, worse = [], []
    for tests in chosen.tests:
        row, lost = compare(checkout, tests, chosen)
        rows.append(row)
        worse += lost
    for cells in (HEAD, ["---"] * len(HEAD), *rows):
        print("| " + " | ".join(cells) + " |")
    passed = sum(int(row[HEAD.index("pass as they are")]) for row in rows)
    print(f"{passed} tests pass as they are; with ours in their place, {len(worse)} of them do not "
          f"{worse}")  # fmt: skip
    return 1 if worse or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
