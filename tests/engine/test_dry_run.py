"""The whole day with GPUs (scripts/gpu/gpu_day.sh), in small sizes with emulated kernels."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.forked_python import forked_python

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
DAY = ["bash", str(ROOT / "scripts" / "gpu" / "gpu_day.sh"), "--dry-run"]
ROW = re.compile(r"^\| ([a-z0-9-]+) \| (.*) \| (\S.*?) \| \d* \|$", re.MULTILINE)


def steps(page: str) -> dict[str, tuple[str, str]]:
    """By name, what a step settles and its result."""
    found = ROW.findall(page)
    return {name: (settles, result) for name, settles, result in found if name != "step"}


# Steps that run what another step or test of the suite runs, too, and by what.
BY_WORTH = "tests/engine/test_first_dry_run.py"  # in a process of its own
ALIKE = {
    "masks": BY_WORTH,
    "replay-whole": BY_WORTH,
    "replay-split": "replay-whole",
    "trains-4-1": BY_WORTH,
    "trains-2-2": BY_WORTH,
    "op-host": BY_WORTH,
    "experts": BY_WORTH,
    "certify-first": BY_WORTH,
    "stage-llama-7b": "stage-llama3-8b",
    "replay": "tests/scripts/test_bench_gpu.py",
    "overlaps": "tests/mcore/test_calibration_traces.py",
    "shared-gloo-2-1": "tests/gpu/test_shared_gpu.py",
    "certify": "certify-kernels",
    "certify-tp": "tests/engine/test_certificate.py",
    "host-lazy": "host",
    "example-tp": "tests/examples/test_launch_scripts.py",
    "lazy-loading": "example",
}


def test_every_step_of_the_day_ends_well(tmp_path) -> None:
    """But those of ALIKE."""
    page = tmp_path / "page.md"
    (tmp_path / "day").mkdir()
    for name in ALIKE:  # as of a day before
        (tmp_path / "day" / f"{name}.state").write_text("ok|0\n")
    with forked_python() as python:
        words = ["--results", str(tmp_path / "day"), "--page", str(page)]
        environment = {**os.environ, "python": str(python)}
        for _ in range(2):  # a neighbour may have taken a port: the day goes on where it stopped
            done = subprocess.run([*DAY, *words], env=environment, capture_output=True, text=True)
            if done.returncode == 0:
                break
    text = page.read_text()
    assert done.returncode == 0, done.stdout + text
    found = steps(text)
    assert {result for _, result in found.values()} == {"ok", "tests found, not run"}
    listed = subprocess.run([*DAY, "--list"], capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(found)
    # What the logs must show is on it: else a pattern is wrong, or a step did nothing.
    for name, says in SHOWN.items():
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert re.search(says, section), section


SHOWN = {
    "host": r"gpus 1 x NVIDIA H100.*, emulated",
    "corpus": r"documents",
    "kernels": r"2 passed",
    "first-iteration": r"5 tests collected",
    "certify-kernels": r"certified: 2 batches, worst error [0-9.]+ of the reference model's own",
    "training": r"3 tests collected",
    "shared-nccl-2-1": r"1/6 tests collected",
    "loops": r"1/\d+ tests collected",
    "prefixes": r"3/\d+ tests collected",
    "log-probs": r"1 passed",
    "flex": r"2 tests collected",
    "multi-gpu": r"7 tests collected",
    "held-sms": r"margin 8: attention",
    "stock": r"lm loss",
    "example": r"epp iteration",
    "recompilations": r"lm loss",
    "fp8": r"6 tests collected",
    "split": r"1 passed",
    "offload": r"\d+ tests collected",
}
