#!/usr/bin/env python3
"""Megatron-LM's own tests of its schedules, run against the schedule that stands in for them.

    git clone --branch core_v0.19.0 --depth 1 https://github.com/NVIDIA/Megatron-LM
    scripts/upstream_schedule_tests.py --megatron Megatron-LM

Runs those of that checkout's unit tests that call a schedule, or pack sequences for one (TESTS), in
8 processes, as they want them, on this host's CPU or its GPUs: as they are, and with
megatron_epp.install_schedule. Prints what passed, and fails where a test passes as it is but not
with ours. The checkout must be of the installed megatron-core's version (0.19.0's tests are those
of 0.19.2); nothing of it is copied into this project. On a host without a GPU some tests fail as
they are, for want of Transformer Engine or of bf16 kernels: they tell nothing, and are listed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/unit_tests/pipeline_parallel/test_schedules.py",
    "tests/unit_tests/pipeline_parallel/test_multimodule_schedules.py",
    "tests/unit_tests/resharding/test_model_swap.py",
    "tests/unit_tests/rl/test_sequence_packing_utils.py",
    "tests/unit_tests/transformer/test_attention_packed_seq.py",
)
RANKS = 8
# Those make groups of other ranks under one name. NCCL meets when a group first speaks; gloo at
# once, where such groups may take each other's ranks for their own and wait for ever.
WITHOUT_GPU = "not custom_pgs"
# Loaded by pytest in every process, before the tests import Megatron. gloo stands in for NCCL, and
# the installed megatron-core for the checkout's, which is not built.
PLUGIN = """
import os, sys
sys.path.insert(0, {root!r})
from megatron_epp.mcore.patching import cpu_host

if cpu_host.install_cpu_host():
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
if os.environ["EPP_STANDS_IN"] == "1":
    import megatron_epp

    megatron_epp.install_schedule()
"""
# In the place of pytest-mock, which this project does not need.
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


def run(checkout: Path, tests: str, stands_in: bool, only: str, patience: float) -> dict[str, str]:
    """What became of each test of a file on rank 0, in a word or two; empty where nothing ran."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "stands_in.py").write_text(PLUGIN.format(root=str(ROOT), ranks=RANKS))
        if find_spec("pytest_mock") is None:
            (home / "pytest_mock.py").write_text(MOCKER)
        # The checkout's tests are a package of their own; its megatron is not to be imported.
        (home / "tests").symlink_to(checkout / "tests")
        environment = {
            **os.environ,
            "EPP_STANDS_IN": str(int(stands_in)),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(home), str(ROOT)]),
        }
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(RANKS), "--redirects", "3", "--log-dir", str(home / "logs"),
            "-m", "pytest", "-v", "-rA", "-p", "stands_in", "-p", "no:cacheprovider",
            "--noconftest", "--rootdir", str(home),
            "-o", "addopts=", str(home / tests),
        ]  # fmt: skip
        if only:
            command += ["-k", only]
        launched = subprocess.Popen(
            command, cwd=home, env=environment, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            launched.wait(patience)
        except subprocess.TimeoutExpired:
            whose = "with ours" if stands_in else "as they are"
            print(f"{tests} {whose}: not done in {patience:.0f} s; what had been said by then:")
        finally:
            launched.terminate()  # torchrun ends its processes, each in a session of its own
            launched.wait()
        logs = sorted((home / "logs").rglob("0/stdout.log"))
        said = logs[0].read_text(errors="replace") if logs else ""
        if not _VERDICT.search(said):
            print(said[-3000:])
        found = {name: verdict for _, name, verdict in _VERDICT.findall(said)}
        for _, name, reason in _REASON.findall(said):
            found[name] = f"{found.get(name, 'ERROR')}: {reason}"
        return found


def compare(checkout: Path, tests: str, only: str, patience: float) -> tuple[int, list[str]]:
    """How many tests of a file passed as they are; those that do not with ours in their place."""
    before, after = (run(checkout, tests, stands_in, only, patience) for stands_in in (False, True))
    print(tests)
    # Cases of one test that end alike are one line.
    lines: Counter[tuple[str, str, str]] = Counter()
    for name, verdict in before.items():
        ours = after.get(name, "did not run")
        lines[name.partition("[")[0], verdict, "the same" if ours == verdict else ours] += 1
    width = max((len(name) for name, _, _ in lines), default=0)
    for (name, verdict, ours), count in lines.items():
        times = f" x {count}" if count > 1 else ""
        print(f"  {name.ljust(width)}  {verdict[:150]}{times}; with ours: {ours[:150]}")
    passed = [name for name, verdict in before.items() if verdict == "PASSED"]
    worse = [name for name in passed if after.get(name) != "PASSED"]
    still = len(passed) - len(worse)
    print(f"  {len(before)} tests; {len(passed)} pass, with ours {still} of them", flush=True)
    return len(passed), worse


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
    passed, worse = 0, []
    for tests in chosen.tests:
        found, lost = compare(checkout, tests, chosen.only, chosen.timeout)
        passed, worse = passed + found, worse + lost
    print(f"{passed} tests pass as they are; with ours in their place, {len(worse)} of them do not "
          f"{worse}")  # fmt: skip
    return 1 if worse or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
