#!/usr/bin/env python3
"""Megatron-LM's own tests of its schedules, run against the schedule that stands in for them.

    git clone --branch core_v0.19.0 --depth 1 https://github.com/NVIDIA/Megatron-LM
    scripts/upstream_schedule_tests.py --megatron Megatron-LM

Runs tests/unit_tests/pipeline_parallel/test_schedules.py of that checkout in 8 processes, as it
wants them, on this host's CPU or its GPUs: as it is, and with megatron_epp.install_schedule. Prints
what passed, and fails where a test passes as it is but not with ours. The checkout must be of the
installed megatron-core's version; nothing of it is copied into this project.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/unit_tests/pipeline_parallel/test_schedules.py"
RANKS = 8
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
_VERDICT = re.compile(r"^\S*test_schedules\.py::(\S+) (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)


def run(checkout: Path, stands_in: bool, only: str, patience: float) -> dict[str, str]:
    """What became of each test on rank 0; empty where nothing ran."""
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
            "-o", "addopts=", str(home / TESTS),
        ]  # fmt: skip
        if only:
            command += ["-k", only]
        try:
            subprocess.run(command, cwd=home, env=environment, timeout=patience, check=False,
                           capture_output=True)  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"not done in {patience:.0f} s; what had been said by then:")
        logs = sorted((home / "logs").rglob("0/stdout.log"))
        said = logs[0].read_text(errors="replace") if logs else ""
        if not _VERDICT.search(said):
            print(said[-3000:])
        return dict(_VERDICT.findall(said))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--megatron", required=True, type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("-k", dest="only", default="", help="pytest's: tests of these names alone")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds, of either run")
    chosen = parser.parse_args()
    checkout = chosen.megatron.resolve()
    if not (checkout / TESTS).exists():
        print(f"--megatron {chosen.megatron}: holds no {TESTS}", file=sys.stderr)
        return 2
    before, after = (
        run(checkout, stands_in, chosen.only, chosen.timeout) for stands_in in (False, True)
    )
    width = max(map(len, before), default=0)
    print(f"{'test'.ljust(width)}  Megatron's  ours")
    for name, verdict in before.items():
        print(f"{name.ljust(width)}  {verdict.ljust(10)}  {after.get(name, 'did not run')}")
    worse = [n for n, verdict in before.items() if verdict == "PASSED" and after.get(n) != verdict]
    print(f"{len(before)} tests; with ours in their place, {len(worse)} no longer pass {worse}")
    return 1 if worse or not before else 0


if __name__ == "__main__":
    sys.exit(main())
